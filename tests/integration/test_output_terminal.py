"""Terminal IPython in a pseudo-terminal: output, bars, Ctrl-C."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pexpect
import psutil
import pytest

from tests.support.kernel import plain

PROMPT = r"In \[\d+\]: "
CONTINUATION = r"   \.\.\.: "


class Terminal:
    """IPython with simple prompts, so that what it writes is lines and not cursor movements."""

    def __init__(self, cwd: Path) -> None:
        arguments = ["-m", "IPython", "--simple-prompt", "--colors=nocolor", "--no-banner", "--no-confirm-exit"]
        self.child = pexpect.spawn(
            sys.executable,
            arguments,
            cwd=str(cwd),
            env={**os.environ, "AIR_NB_DEVICE": "cpu", "TERM": "xterm"},
            encoding="utf-8",
            timeout=30,
            dimensions=(50, 200),
        )
        self.child.expect(PROMPT)

    def start(self, *lines: str) -> None:
        """Type a cell; returns when the last line is entered."""
        for line in lines[:-1]:
            self.child.sendline(line)
            self.child.expect(CONTINUATION)
        self.child.sendline(lines[-1])
        if lines[0].startswith("%%"):
            for _ in range(2):  # a cell magic ends with two empty lines
                self.child.expect(CONTINUATION)
                self.child.sendline("")

    def output(self) -> list[str]:
        """Lines up to the next prompt, without what was typed."""
        self.child.expect(PROMPT)
        return plain(self.child.before).replace("\r\n", "\n").strip("\n").split("\n")

    def run(self, *lines: str) -> list[str]:
        self.start(*lines)
        output = self.output()
        return [line for line in output if line and line not in lines]

    def close(self) -> None:
        self.child.sendline("exit")
        self.child.expect(pexpect.EOF)
        self.child.close()


@pytest.fixture(scope="module")
def terminal(tmp_path_factory):
    terminal = Terminal(tmp_path_factory.mktemp("cwd"))
    terminal.run("%load_ext air_nb")
    terminal.run("from air_nb.runtime import get_rank")
    yield terminal
    terminal.close()
    assert not psutil.pid_exists(terminal.child.pid)


def test_header_folded_lines_and_footer(terminal):
    lines = terminal.run("%%distributed --nproc 2 --name calm-otter", 'print("same"); print("rank", get_rank())')
    assert lines[0].startswith("run calm-otter · 2 ranks on CPU")
    assert re.fullmatch(r"FINISHED in \d+\.\d s", lines[-1])
    assert sorted(re.sub(r"^\[.*\] ", "", line) for line in lines if "rank " in line[4:10]) == ["rank 0", "rank 1"]
    assert any(line.endswith(" same") for line in lines)


@pytest.mark.parametrize(
    "options, expected",
    [
        ("", ["[0-1] a", "[0-1] b"]),
        ("--output rank0", ["a", "b"]),
        ("--output none", []),
        ("--output tabs", ["── rank 0: 2 lines, ended ──", "a", "b", "── rank 1: 2 lines, ended ──", "a", "b"]),
    ],
)
def test_every_mode_is_plain_text(terminal, options, expected):
    assert terminal.run(f"%%distributed --nproc 2 --quiet {options}", 'print("a"); print("b")') == expected


def test_all_shows_each_rank(terminal):
    lines = terminal.run("%%distributed --nproc 2 --quiet --output all", 'print("a"); print("b")')
    assert sorted(lines) == ["[0] a", "[0] b", "[1] a", "[1] b"]


def test_the_echo_of_the_last_expression_and_displays_are_text(terminal):
    lines = terminal.run(
        "%%distributed --nproc 2 --quiet",
        "from IPython.display import HTML, display",
        'display(HTML("<b>x</b>"))',
        "42",
    )
    assert lines[-1] == "[0-1] 42"
    assert any("IPython.core.display.HTML object" in line for line in lines)


def test_bars_of_several_ranks_are_shown_in_their_last_state(terminal):
    lines = terminal.run(
        "%%distributed --nproc 4",
        "from tqdm import tqdm",
        "for _ in tqdm(range(300), mininterval=0): pass",
    )
    bars = [line for line in lines if "%|" in line]
    assert sorted(bar[:3] for bar in bars) == ["[0]", "[1]", "[2]", "[3]"]
    assert all("300/300" in bar for bar in bars)


def test_a_bar_of_a_single_rank_moves_as_in_any_terminal(terminal):
    terminal.start(
        "%%distributed --nproc 1",
        "from tqdm import tqdm",
        "for _ in tqdm(range(300), mininterval=0): pass",
    )
    terminal.child.expect(PROMPT)
    assert terminal.child.before.count("\r  ") + terminal.child.before.count("\r 5") > 10
    assert "100%|" in terminal.child.before


def test_the_first_line_is_there_while_the_run_lasts(terminal, tmp_path):
    go = tmp_path / "go"
    terminal.start(
        "%%distributed --nproc 2",
        "import os, time",
        'print("fir" + "st")',
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)",
        'print("sec" + "ond")',
    )
    terminal.child.expect(r"\] first")
    go.touch()
    assert terminal.output()[-2].endswith("second")


def test_a_failure_shows_the_ranks_own_line(terminal):
    lines = terminal.run("%%distributed --nproc 2", 'print("before")', "if get_rank() == 1: 1 / 0")
    text = "\n".join(lines)
    assert "RankFailedError: rank 1 of 2 failed" in text
    assert "ZeroDivisionError: division by zero" in text
    assert "if get_rank() == 1: 1 / 0" in text
    assert text.index("before") < text.index("RankFailedError")
    assert "air_nb/" not in text


def test_ctrl_c_interrupts_the_run_and_the_next_one_works(terminal, tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    terminal.start(
        "%%distributed --nproc 2",
        "import os, pathlib, time",
        f"pathlib.Path({str(pids)!r}, str(os.getpid())).touch()",
        'print("run" + "ning", flush=True)',
        "time.sleep(600)",
    )
    terminal.child.expect("running")
    while len(list(pids.iterdir())) < 2:
        terminal.child.expect(pexpect.TIMEOUT, timeout=0.1)
    terminal.child.sendintr()
    lines = terminal.output()
    assert any("KeyboardInterrupt" in line for line in lines)
    assert any("KILLED in " in line for line in lines), lines
    assert not any(psutil.pid_exists(int(path.name)) for path in pids.iterdir())
    assert terminal.run("%%distributed --nproc 2 --quiet", 'print("again")') == ["[0-1] again"]


def test_ctrl_c_while_idle_does_not_touch_the_launcher(terminal):
    before = children(terminal)
    # Python loses a Ctrl-C that comes between the prompt and the read behind it, so a person presses it again.
    for _ in range(5):
        terminal.child.sendintr()
        if terminal.child.expect([PROMPT, pexpect.TIMEOUT], timeout=3) == 0:
            break
    assert terminal.run("%%distributed --nproc 2 --quiet", 'print("still here")') == ["[0-1] still here"]
    assert before <= children(terminal)


def children(terminal):
    return set(psutil.Process(terminal.child.pid).children(recursive=True))
