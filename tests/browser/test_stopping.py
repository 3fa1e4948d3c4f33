"""An error, the stop button and the restart button of a real JupyterLab page, while ranks run."""

from __future__ import annotations

import time

import psutil

from tests.browser.lab import measured

_LOAD = "%load_ext air_nb\nfrom air_nb.runtime import get_rank"
_ENDLESS = "%%distributed --nproc 2\nimport time\nprint('ranks are running')\nwhile True: time.sleep(0.1)"
_NEXT = "%%distributed --nproc 2\nprint('the next cell works')"


def test_an_error_of_one_rank_is_shown_with_the_line_of_the_cell_and_the_next_cell_works(open_notebook):
    failing = "%%distributed --nproc 2\nif get_rank() == 1:\n    raise ValueError('bad batch')\nprint('trained')"
    notebook = open_notebook(_LOAD, failing, _NEXT)
    notebook.run(0)
    shown = notebook.run(1)
    assert "RankFailedError: rank 1 of 2 failed" in shown
    assert "----> 3     raise ValueError('bad batch')" in shown
    assert shown.rstrip().endswith("ValueError: bad batch")
    assert "[0-1] the next cell works" in notebook.run(2)


def test_the_stop_button_shows_keyboardinterrupt_and_the_next_cell_works(open_notebook):
    notebook = open_notebook(_LOAD, _ENDLESS, _NEXT)
    notebook.run(0)
    notebook.start(1)
    notebook.wait_for_text(1, "[0-1] ranks are running")
    notebook.press_stop()
    notebook.wait(1)
    shown = notebook.output(1)
    assert "KeyboardInterrupt" in shown
    assert "KILLED in" in shown
    assert "RankFailedError" not in shown
    assert "[0-1] the next cell works" in notebook.run(2)


def test_the_restart_button_ends_running_ranks_and_the_next_kernel_starts_clean(open_notebook, lab):
    notebook = open_notebook(_LOAD, _ENDLESS, _NEXT)
    notebook.run(0)
    notebook.start(1)
    notebook.wait_for_text(1, "[0-1] ranks are running")
    (kernel,) = psutil.Process(lab.process.pid).children()
    ours = kernel.children(recursive=True)
    assert len(ours) >= 4, ours  # launcher, forkserver, two ranks
    pressed_at = time.monotonic()
    notebook.press_restart()
    kernel.wait(30)  # Jupyter first asks a busy kernel to end by itself
    ended_at = time.monotonic()
    _, alive = psutil.wait_procs(ours, timeout=10)
    measured(f"kernel ended after {ended_at - pressed_at:.1f} s, all else {time.monotonic() - ended_at:.1f} s later")
    assert not alive
    notebook.wait_for_idle()
    notebook.run(0)
    assert "[0-1] the next cell works" in notebook.run(2)
