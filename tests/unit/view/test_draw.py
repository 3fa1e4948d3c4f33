from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import textwrap

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from air_nb.protocol.events import RankBegan, RankEnded, Rich, Text
from air_nb.view import draw
from air_nb.view.actions import Clear, Print, Show, Update
from air_nb.view.cell import CellView
from air_nb.view.draw import Drawer, Front, detect_front

KERNEL = Front("kernel", live_bars=True, tty=False, stored=True)
TERMINAL = Front("terminal", live_bars=False, tty=False, stored=False)
SCRIPT = Front("script", live_bars=False, tty=False, stored=False)


class _Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def shell():
    # Its history file would still be open when the interpreter ends, after the folder is gone.
    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture
def clock():
    return _Clock()


def show(text, key=None):
    return Show({"text/plain": text}, {}, key)


def update(text, key):
    return Update({"text/plain": text}, {}, key)


def texts(captured):
    return [output.data["text/plain"] for output in captured.outputs]


def test_first_output_is_drawn_at_once_and_what_follows_a_moment_later(shell, clock):
    drawer = Drawer(KERNEL, clock=clock)
    with capture_output() as captured:
        drawer.draw([Print("stdout", "a")])
        assert str(captured.stdout) == "a"
        assert drawer.timeout() is None
        drawer.draw([Print("stdout", "b")])
        assert str(captured.stdout) == "a"
        assert drawer.timeout() == pytest.approx(0.002)
        clock.now += 0.002
        drawer.draw(())
    assert captured.stdout == "ab"


def test_flood_is_drawn_20_times_a_second(shell, clock):
    drawer = Drawer(KERNEL, clock=clock)
    with capture_output():
        drawer.draw([Print("stdout", "a" * 10_000)])
        drawer.draw([Print("stdout", "b")])
        assert drawer.timeout() == pytest.approx(0.05)
        drawer.close()


def test_many_updates_of_a_display_become_one(shell, clock):
    drawer = Drawer(KERNEL, clock=clock)
    with capture_output() as captured:
        drawer.draw([show("0", "k"), update("1", "k"), update("2", "k"), update("x", "other")])
        for step in range(3, 100):
            drawer.draw([update(str(step), "k")])
        drawer.close()
    assert texts(captured) == ["2", "x", "99"]
    assert [output.update for output in captured.outputs] == [False, True, True]
    assert {output.transient["display_id"] for output in captured.outputs} == {"k", "other"}


def test_what_an_animation_clears_before_it_is_drawn_is_not_drawn(shell, clock):
    drawer = Drawer(KERNEL, clock=clock)
    with capture_output() as captured:
        drawer.draw([Print("stdout", "first\n")])
        for step in range(50):
            drawer.draw([Clear(wait=True), show(str(step))])
        assert drawer._waiting == [Clear(wait=True), show("49")]
        drawer.close()
    assert texts(captured) == ["49"]


def test_what_is_cleared_with_wait_stays_until_there_is_more(shell, clock):
    drawer = Drawer(KERNEL, clock=clock)
    with capture_output() as captured:
        drawer.draw([Print("stdout", "")])
        drawer.draw([show("last"), Clear(wait=True)])
        drawer.flush()
        assert captured.outputs == []  # IPython's capture clears at once; what matters is that both were sent
    drawer = Drawer(KERNEL, clock=clock)
    drawer.hold([show("last"), Clear(wait=True)])
    assert drawer._waiting == [show("last"), Clear(wait=True)]


def test_streams_are_flushed_in_the_order_in_which_they_were_written(monkeypatch):
    calls = []

    class Stream(io.StringIO):
        def __init__(self, name):
            super().__init__()
            self.label = name

        def write(self, text):
            calls.append((self.label, text))
            return len(text)

        def flush(self):
            calls.append((self.label, "flush"))

    monkeypatch.setattr(sys, "stdout", Stream("out"))
    monkeypatch.setattr(sys, "stderr", Stream("err"))
    Drawer(SCRIPT).draw([Print("stdout", "1"), Print("stderr", "2"), Print("stdout", "3")])
    assert calls == [("out", "1"), ("out", "flush"), ("err", "2"), ("err", "flush"), ("out", "3"), ("out", "flush")]


@pytest.mark.parametrize("front", [TERMINAL, SCRIPT])
def test_display_that_cannot_be_updated_is_not_repeated(shell, capsys, front):
    drawer = Drawer(front)
    drawer.draw([show("0%", "k"), show("same", "s"), Show({"image/png": "x"}, {}, None)])
    drawer.draw([update("same", "s")])
    for step in range(1, 100):
        drawer.draw([update(f"{step}%", "k")])
    drawer.close()
    lines = [line for line in capsys.readouterr().out.splitlines() if line != "<display of image/png>"]
    assert lines == ["0%", "same", "99%"]


def test_front_of_a_script_and_of_a_terminal(shell, monkeypatch):
    assert detect_front().kind == "terminal"
    InteractiveShell.clear_instance()
    assert detect_front() == SCRIPT
    monkeypatch.setattr(draw, "_shell", lambda: None)
    assert detect_front().kind == "script"


def test_script_needs_no_ipython():
    code = """
        import sys
        from air_nb.protocol.events import RankBegan, Rich, Text
        from air_nb.view.cell import CellView
        from air_nb.view.draw import detect_front
        view = CellView(2, "merged", "r", quiet=False, front=detect_front())
        view.start("header")
        view.feed([Text(0, "stdout", "a\\n"), Text(1, "stdout", "a\\n"), Text(1, "stderr", "\\r 1%\\r100%\\n")])
        view.feed([Rich(r, "display_data", {"text/plain": "<Figure>", "image/png": ""}, {}) for r in (0, 1)])
        view.finish("footer")
        assert "IPython" not in sys.modules
        assert "ipywidgets" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # rank 1's bar stands in front of its figure, so that figure is shown by itself
    assert done.stdout.splitlines()[:2] == ["header", "[0-1] a"]
    assert done.stdout.splitlines()[-1] == "footer"
    assert done.stderr == "[1] 100%\n"
    assert "<Figure>" in done.stdout


def test_redirected_stdout_gets_everything(shell):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        view = CellView(1, "merged", "r", quiet=False, front=detect_front())
        view.feed([Text(0, "stdout", "line\n" * 5_000), Text(0, "stderr", "\r1%\r2%\n"), RankEnded(0)])
        view.finish()
    assert out.getvalue() == "line\n" * 5_000
    assert err.getvalue() == "2%\n"


def test_captured_cell_gets_text_and_figures(shell):
    with capture_output() as captured:
        view = CellView(2, "merged", "r", quiet=False, front=detect_front())
        view.start("header")
        for rank in range(2):
            view.feed(
                [Text(rank, "stdout", "a\n"), Rich(rank, "display_data", {"image/png": "x"}, {}), RankEnded(rank)]
            )
        view.finish("footer")
    assert captured.stdout == "header\n[0-1] a\n[0-1]\nfooter\n"
    assert [output.data for output in captured.outputs] == [{"image/png": "x"}]


def test_view_says_when_it_needs_a_tick(shell):
    view = CellView(2, "merged", "r", quiet=False, front=TERMINAL)
    assert view.timeout() is None
    view.feed([RankBegan(0), RankBegan(1), Text(0, "stdout", "a\n")])
    timeout = view.timeout()
    assert timeout is not None
    assert 0 <= timeout <= 0.15
    view.finish()
    assert view.timeout() is None
