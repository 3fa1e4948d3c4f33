"""Where every rank is: of a live run on request, of one that does not stop, of one that never gets going."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from air_nb.runs.directory import find_run
from tests.faults.conftest import TaggedKernel, new_kernel

_WAITING = """%%distributed --nproc 3 --name {name}
import os, time

def wait_for_ever():
    time.sleep(600)  # the line to see

print('go')
if os.environ['RANK'] == '2':
    while True: pass
wait_for_ever()
"""


def _end(kernel: TaggedKernel, cell) -> None:
    kernel.kernel.interrupt()
    kernel.follow(cell, timeout_s=30)


def test_stacks_of_a_live_run_are_shown_in_another_notebook_and_the_run_goes_on(kernel: TaggedKernel, tmp_path: Path):
    for other in new_kernel(tmp_path):
        cell = kernel.start(_WAITING.format(name="where-is-it"))
        kernel.follow(cell, until=lambda cell: "[0-2] go" in cell.text or cell.text.count("] go") == 3)
        for _ in range(2):  # the second answer is no mixture with the first
            text = other.ok("%air stacks where-is-it").text
            assert text.count("ranks 0-1:") == 1, text
            assert text.count("rank 2:") == 1
            assert text.count("----> time.sleep(600)  # the line to see") == 1
            assert text.count("in wait_for_ever") == 1
            assert "----> while True: pass" in text
            assert "Cell In[" in text
            assert "air_nb/rank" not in text
        assert not cell.idle_at
        assert find_run("where-is-it")[1].state == "RUNNING"
        _end(kernel, cell)
        assert cell.error is not None
        assert cell.error["ename"] == "KeyboardInterrupt"
        assert "UsageError: %air stacks: run where-is-it has ended: KILLED" in other.run("%air stacks where-is-it").text


def test_a_rank_that_cannot_answer_does_not_show_what_it_answered_before(kernel: TaggedKernel, tmp_path: Path):
    for other in new_kernel(tmp_path):
        cell = kernel.start(_WAITING.format(name="frozen"))
        kernel.follow(cell, until=lambda cell: "[0-2] go" in cell.text or cell.text.count("] go") == 3)
        assert "rank 2:" in other.ok("%air stacks frozen").text
        rank = find_run("frozen")[1].ranks[2]
        assert rank is not None
        psutil.Process(rank.pid).suspend()
        text = other.ok("%air stacks frozen").text
        psutil.Process(rank.pid).resume()
        _end(kernel, cell)
    assert "ranks 0-1:" in text
    assert "rank 2:\n  no Python stack: the process did not answer" in text


def test_stacks_name_the_ranks_that_have_ended(kernel: TaggedKernel, tmp_path: Path):
    code = "import os, time\nprint('go')\ntime.sleep(600 * int(os.environ['RANK']))"
    for other in new_kernel(tmp_path):
        cell = kernel.start(f"%%distributed --nproc 2 --name one-left\n{code}")
        kernel.follow(cell, until=lambda cell: "[0-1] go" in cell.text or cell.text.count("] go") == 2)
        first = find_run("one-left")[1].ranks[0]
        end = time.monotonic() + 20
        while first is not None and first.is_alive() and time.monotonic() < end:
            time.sleep(0.05)
        text = other.ok("%air stacks one-left").text
        _end(kernel, cell)
    assert "rank 1:" in text
    assert "rank 0 has ended" in text


def test_a_question_that_comes_while_ranks_start_kills_none(kernel: TaggedKernel):
    """A rank that has no handler yet would die of the signal."""
    code = """
import threading, time
from air_nb.launch import stacks
from air_nb.runs.directory import all_runs
def ask():
    while not (found := [run for run in all_runs() if run[1].name == "asked-early" and run[1].ranks]):
        pass
    directory, record = found[0]
    for _ in range(20):
        stacks.collect_stacks(directory, {0: record.ranks[0], 1: record.ranks[1]}, 0.01)
thread = threading.Thread(target=ask)
thread.start()
try:
    get_ipython().run_cell_magic("distributed", "--nproc 2 --name asked-early", "import time\\ntime.sleep(0.5)")
finally:
    thread.join()
"""
    for _ in range(3):
        kernel.ok(code.replace("asked-early", f"asked-{time.monotonic_ns()}"))


_DEAF = {
    "ignores both signals": ("for number in (2, 15): signal.signal(number, signal.SIG_IGN)", "time.sleep(600)  # deaf"),
    "in C with the GIL": ("pass", "sum(itertools.repeat(1, 10**12))"),
}


@pytest.mark.parametrize("first,then", [pytest.param(*case, id=name) for name, case in _DEAF.items()])
def test_an_interrupt_shows_where_the_ranks_are_that_do_not_react(kernel: TaggedKernel, first: str, then: str):
    code = f"""%%distributed --nproc 2
import itertools, os, signal, time
print('go')
if os.environ['RANK'] == '0': time.sleep(600)
{first}
{then}"""
    cell, _ = kernel.interrupt_when_shown(code, "[0-1] go")
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert cell.traceback.splitlines()[:3] == [
        "KeyboardInterrupt: all ranks were stopped.",
        "rank 1 did not end within 3 s of SIGINT:",
        f"  Cell In[{cell.messages[1][1]['content']['execution_count']}], line 6, in <module>",
    ]
    assert f"----> {then}" in cell.traceback
    assert "rank 0" not in cell.traceback
    assert kernel.below_forkserver() == []


_BLOCKS = "import time\n\ndef hold():\n    time.sleep(600)  # blocks\n\nhold()\n"
_RENDEZVOUS = """
import os, time
from air_nb.runtime import init_process_group
init_process_group() if os.environ['RANK'] == '0' else time.sleep(600)
"""
_STALLS = {
    "import": ("import blocking_module", ["----> import blocking_module", "time.sleep(600)  # blocks", "in hold"]),
    "rendezvous": (_RENDEZVOUS, ["rank 0:", "----> init_process_group() if", "in init_process_group", "rank 1:"]),
    "payload": ("print(slow)", ["ranks 0-1:", "in thaw", "time.sleep(600)  # rebuilding"]),
}


@pytest.mark.parametrize("run", ["", "nowhere"])
def test_stacks_of_no_run_are_a_usage_error_of_one_line(kernel: TaggedKernel, run: str):
    text = kernel.run(f"%air stacks {run}").text
    assert text.startswith("UsageError: %air")
    assert len(text.strip().splitlines()) == 1
    assert run in text


@pytest.mark.parametrize("code,shown", [pytest.param(*case, id=name) for name, case in _STALLS.items()])
def test_a_start_that_stalls_ends_at_the_time_limit_and_says_where(
    kernel: TaggedKernel, tmp_path: Path, code: str, shown: list[str]
):
    (tmp_path / "blocking_module.py").write_text(_BLOCKS)
    (tmp_path / "rebuilding.py").write_text("import time\ndef rebuild():\n    time.sleep(600)  # rebuilding\n")
    kernel.ok(
        f"import sys\nsys.path.insert(0, {os.fspath(tmp_path)!r})\nimport rebuilding\n"
        "class Slow:\n    def __reduce__(self): return rebuilding.rebuild, ()\nslow = Slow()"
    )
    cell = kernel.run(f"%%distributed --nproc 2 --timeout 3\n{code}")
    kernel.ok("sys.path.pop(0)")
    assert cell.error is not None
    assert cell.error["ename"] == "RunTimeoutError"
    assert "time limit of 3 s" in cell.traceback
    for text in shown:
        assert text in cell.traceback, cell.traceback
    assert kernel.below_forkserver() == []
    assert kernel.last_record()["state"] == "TIMED_OUT"
