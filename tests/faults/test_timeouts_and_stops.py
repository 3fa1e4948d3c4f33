"""A run that is ended from outside: by its time limit, by `%air stop`; what the user is told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.conftest import TaggedKernel, new_kernel

_HANG = """
import os, time

def wait_for_ever():
    time.sleep(600)  # the line to see

def spin():
    while True:
        pass

print('go')
spin() if os.environ['RANK'] == '2' else wait_for_ever()
"""


def test_a_timeout_shows_where_every_rank_was_and_leaves_nothing(kernel: TaggedKernel):
    cell = kernel.run(f"%%distributed --nproc 3 --timeout 2\n{_HANG}")
    assert cell.error is not None
    assert cell.error["ename"] == "RunTimeoutError"
    assert "time limit of 2 s" in cell.traceback
    assert "ranks 0-1:" in cell.traceback
    assert "rank 2:" in cell.traceback
    assert cell.traceback.count("in wait_for_ever") == 1
    assert "time.sleep(600)  # the line to see" in cell.traceback
    assert "Cell In[" in cell.traceback
    assert "in spin" in cell.traceback
    assert "multiprocessing" not in cell.traceback
    assert "air_nb/rank" not in cell.traceback
    assert kernel.last_record()["state"] == "TIMED_OUT"
    assert kernel.below_forkserver() == []


def test_a_timeout_ends_ranks_that_block_in_c_and_says_that_they_did_not_answer(kernel: TaggedKernel):
    cell = kernel.run("%%distributed --nproc 2 --timeout 2\nimport itertools\nsum(itertools.repeat(1, 10**12))")
    assert cell.error is not None
    assert cell.error["ename"] == "RunTimeoutError"
    assert "ranks 0-1:" in cell.traceback
    assert kernel.below_forkserver() == []


def test_the_results_of_ranks_that_had_finished_are_on_the_timeout(kernel: TaggedKernel):
    kernel.ok(
        "try:\n"
        "    get_ipython().run_cell_magic('distributed', '--nproc 2 --timeout 3 --out got', 'import os, time\\n"
        'rank = int(os.environ["RANK"])\\ntime.sleep(600 * rank)\\nrank + 5\')\n'
        "except TimeoutError as error:\n"
        "    caught = error"
    )
    assert kernel.value("caught.results") == "[5, None]"


def test_a_run_is_stopped_from_another_notebook(kernel: TaggedKernel, tmp_path: Path):
    for other in new_kernel(tmp_path):
        cell = kernel.start("%%distributed --nproc 2 --name stop-me\nimport time\nprint('go')\ntime.sleep(600)")
        kernel.follow(cell, until=lambda cell: "go" in cell.text)
        assert "was stopped" in other.ok("%air stop stop-me").text
        kernel.follow(cell, timeout_s=30)
        assert cell.error is not None
        assert cell.error["ename"] == "RunStoppedError"
        assert "%air stop" in cell.traceback
        assert kernel.last_record()["state"] == "KILLED"
        assert kernel.below_forkserver() == []


@pytest.mark.parametrize("wait_s", [0.0, 0.1])
def test_a_stop_that_comes_while_ranks_start_counts(kernel: TaggedKernel, wait_s: float):
    code = """
import threading, time
from air_nb.session import commands
from air_nb.runs.directory import all_runs
def stop():
    while not any(record.name == "early" and record.is_live for _, record in all_runs()):
        time.sleep(0.005)
    time.sleep({wait_s})
    commands.stop_run("early")
thread = threading.Thread(target=stop)
thread.start()
try:
    get_ipython().run_cell_magic("distributed", "--nproc 2 --name early", "import time\\ntime.sleep(600)")
finally:
    thread.join()
"""
    begun = time.monotonic()
    cell = kernel.run(code.replace("{wait_s}", str(wait_s)))
    assert cell.error is not None
    assert cell.error["ename"] == "RunStoppedError"
    assert time.monotonic() - begun < 30
