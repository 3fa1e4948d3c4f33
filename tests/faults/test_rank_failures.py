"""A rank fails: the cell ends with that rank's own error, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import TaggedKernel
from tests.support.wait import eventually

_IN_BARRIER = """
import os, torch.distributed as dist
from air_nb.runtime import init_process_group
init_process_group()
rank = dist.get_rank()
"""
_CATCH = """
import sys
try:
    get_ipython().run_cell_magic("distributed", {options!r}, {code!r})
except BaseException as error:
    caught = error
"""


def _catch(kernel: TaggedKernel, code: str, options: str = "--nproc 3"):
    kernel.ok("caught = None")
    return kernel.ok(_CATCH.format(options=options, code=code))


@pytest.fixture(autouse=True)
def nothing_left(kernel: TaggedKernel):
    yield
    assert kernel.below_forkserver() == []


def test_a_rank_that_raises_while_the_others_wait_in_a_barrier_is_named_with_its_own_line(kernel: TaggedKernel):
    code = _IN_BARRIER + "if rank == 1:\n    raise KeyError('no such sample')\ndist.barrier()\nrank"
    cell = kernel.run(f"%%distributed --nproc 3 --out got\n{code}")
    assert cell.reply_status == "error"
    assert cell.error is not None
    assert cell.error["ename"] == "RankFailedError"
    assert "rank 1 of 3 failed" in cell.traceback
    assert "raise KeyError('no such sample')" in cell.traceback
    assert "ranks 0, 2 were stopped; rank 1 failed first" in cell.traceback
    assert "failed too" not in cell.traceback
    assert "Connection" not in cell.text
    assert "KeyboardInterrupt" not in cell.text
    assert kernel.last_record()["state"] == "FAILED"


def test_a_rank_that_raises_while_the_others_wait_for_an_asynchronous_collective(kernel: TaggedKernel):
    """Their errors would come from the cell's own frames: they must not come at all."""
    code = _IN_BARRIER + "if rank == 1:\n    raise KeyError('gone')\ndist.barrier(async_op=True).wait()"
    cell = kernel.run(f"%%distributed --nproc 3\n{code}")
    assert "rank 1 of 3 failed" in cell.traceback
    assert "failed too" not in cell.traceback
    assert "ranks 0, 2 were stopped; rank 1 failed first" in cell.traceback


def test_the_error_carries_the_original_exception_the_failures_and_the_results_of_the_others(kernel: TaggedKernel):
    code = "import os, time\nrank = int(os.environ['RANK'])\nif rank == 1:\n    time.sleep(1)\n    1 / 0\nrank * 10"
    _catch(kernel, code, "--nproc 3 --out got")
    assert (
        kernel.value("type(caught.__cause__).__name__, str(caught.__cause__)")
        == "('ZeroDivisionError', 'division by zero')"
    )
    assert kernel.value("[(f.rank, f.type_name, f.attempt, f.signal) for f in caught.failures]") == (
        "[(1, 'ZeroDivisionError', 0, None)]"
    )
    assert kernel.value("caught.results") == "[0, None, 20]"
    assert kernel.value("'got' in globals()") == "False"


def test_equal_tracebacks_of_several_ranks_are_shown_once(kernel: TaggedKernel):
    kernel.ok("import time\nat = time.time() + 2")
    cell = kernel.run("%%distributed --nproc 3\nimport time\ntime.sleep(at - time.time())\nvalues = []\nvalues[3]")
    assert "ranks 0-2 of 3 failed" in cell.traceback
    assert cell.traceback.count("values[3]") == 1
    assert "failed too" not in cell.traceback


def test_a_second_cell_works_right_after_a_failed_one(kernel: TaggedKernel):
    assert kernel.run("%%distributed --nproc 2\n1 / 0").reply_status == "error"
    assert "[0-1] fine" in kernel.ok("%%distributed --nproc 2\nprint('fine')").text


def test_an_exception_class_of_the_cell_arrives_as_text(kernel: TaggedKernel):
    _catch(kernel, "class Broken(ValueError): pass\nraise Broken('in two')")
    assert kernel.value("type(caught).__name__") == "'RankFailedError'"
    assert "Broken" in kernel.value("caught.failures[0].type_name")
    assert "in two" in kernel.value("str(caught.__cause__)")


def test_an_exception_class_of_the_notebook_is_the_kernels_own(kernel: TaggedKernel):
    kernel.ok("class Mine(Exception): pass")
    _catch(kernel, "raise Mine('yes')")
    assert kernel.value("type(caught.__cause__) is Mine, caught.__cause__.args") == "(True, ('yes',))"


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            "error = ValueError('locked')\nerror.lock = __import__('threading').Lock()\nraise error", id="unpicklable"
        ),
        pytest.param(
            "class Picky(Exception):\n    def __init__(self, *, b): super().__init__(f'b is {b}')\nraise Picky(b=2)",
            id="custom init",
        ),
        pytest.param(
            "class Sly(Exception):\n    def __reduce__(self): return exec, ('raise SystemExit',)\nraise Sly('locked')",
            id="its pickle exits",
        ),
    ],
)
def test_an_exception_that_cannot_be_rebuilt_becomes_a_remote_error(kernel: TaggedKernel, code: str):
    _catch(kernel, code)
    assert kernel.value("type(caught).__name__") == "'RankFailedError'"
    assert kernel.value("type(caught.__cause__).__name__") == "'RemoteError'"
    assert kernel.value("caught.failures[0].type_name in str(caught.__cause__)") == "True"


def test_an_exception_whose_text_raises_is_shown_all_the_same(kernel: TaggedKernel):
    cell = kernel.run("%%distributed --nproc 1\nclass Rude(Exception):\n    def __str__(self): 1 / 0\nraise Rude()")
    assert cell.error is not None
    assert cell.error["ename"] == "RankFailedError"
    assert "raise Rude()" in cell.traceback


@pytest.mark.parametrize(
    "code,says",
    [
        ("import ctypes\nctypes.string_at(0)", "was killed by SIGSEGV"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("import os\nos.abort()", "was killed by SIGABRT"),
        ("import sys\nsys.exit(0)", "sys.exit(0) was called before the work was done"),
        ("import sys\nsys.exit(3)", "sys.exit(3) was called before the work was done"),
        ("import sys\nsys.exit('no data')", "no data"),
        ("import os\nos._exit(0)", "ended with exit code 0 before its work was done"),
        ("import os\nos._exit(7)", "ended with exit code 7 before its work was done"),
    ],
)
def test_a_rank_that_ends_early_is_an_error_while_the_others_wait(kernel: TaggedKernel, code: str, says: str):
    body = "\n".join("    " + line for line in code.splitlines())
    cell = kernel.run(f"%%distributed --nproc 3\n{_IN_BARRIER}\nif rank == 2:\n{body}\ndist.barrier()")
    assert cell.error is not None
    assert cell.error["ename"] == "RankFailedError"
    assert "rank 2 of 3 failed" in cell.traceback
    assert says in cell.traceback
    assert "ranks 0-1 were stopped; rank 2 failed first" in cell.traceback
    assert "failed too" not in cell.traceback


def test_a_rank_killed_in_an_allreduce_of_a_backward_pass_is_the_cause(kernel: TaggedKernel):
    code = (
        _IN_BARRIER
        + """
import signal, torch
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(10_000):
    if rank == 1 and step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 4)).sum().backward()
"""
    )
    cell = kernel.run(f"%%distributed --nproc 3\n{code}")
    assert "rank 1 of 3 failed" in cell.traceback
    assert "was killed by SIGKILL" in cell.traceback
    assert "failed too" not in cell.traceback


def test_a_result_that_cannot_be_pickled_is_an_error_that_names_it(kernel: TaggedKernel):
    cell = kernel.run("%%distributed --nproc 2 --out got\nimport threading\nthreading.Lock()")
    assert cell.reply_status == "error"
    assert "can't be sent back" in cell.traceback
    assert "lock" in cell.traceback


def test_a_payload_that_cannot_be_loaded_on_the_rank_is_that_ranks_error(kernel: TaggedKernel):
    kernel.ok(
        "class Trap:\n    def __reduce__(self): return exec, ('raise OSError(\"not on this rank\")',)\ntrap = Trap()"
    )
    cell = kernel.run("%%distributed --nproc 2\nprint(trap)")
    assert cell.error is not None
    assert cell.error["ename"] == "RankFailedError"
    assert "not on this rank" in cell.traceback


def test_a_rank_that_closes_its_stdout_fails_only_if_it_prints(kernel: TaggedKernel):
    cell = kernel.ok("%%distributed --nproc 2 --out got\nimport os\nprint('before')\nos.close(1)\nos.close(2)\n5")
    assert "[0-1] before" in cell.text
    assert kernel.value("got") == "[5, 5]"
    cell = kernel.run("%%distributed --nproc 2\nimport os\nos.close(1)\nprint('x')")
    assert "Bad file descriptor" in cell.traceback


def test_a_rank_that_changes_its_directory_changes_no_other(kernel: TaggedKernel):
    kernel.ok("import os\nhere = os.getcwd()")
    kernel.ok("%%distributed --nproc 2 --out got\nimport os\nos.chdir('/')\nos.getcwd()")
    assert kernel.value("got, os.getcwd() == here") == "(['/', '/'], True)"


def test_a_removed_working_directory_is_an_error_before_anything_starts(kernel: TaggedKernel, tmp_path: Path):
    gone = tmp_path / "gone"
    gone.mkdir()
    kernel.ok(f"import os\nhere = os.getcwd()\nos.chdir({str(gone)!r})")
    gone.rmdir()
    runs = kernel.ok("%air runs").text
    cell = kernel.run("%%distributed --nproc 2\nprint(1)")
    kernel.ok("os.chdir(here)")
    assert "working directory was removed" in cell.traceback
    assert len(cell.traceback.splitlines()) < 4
    assert kernel.ok("%air runs").text.count("\n") == runs.count("\n")


def test_what_a_finished_rank_leaves_behind_is_gone_when_the_cell_returns(
    kernel: TaggedKernel, programs: Path, tmp_path: Path
):
    code = f"import sys\nsys.path.insert(0, PROGRAMS)\nimport leaver\nheld = leaver.leave({str(tmp_path)!r})"
    kernel.ok(f"%%distributed --nproc 2\n{code}")
    assert kernel.below_forkserver() == []
    left = [
        process for process in kernel.processes() if "sleep" in process.name() or "daemon.py" in str(process.cmdline())
    ]
    assert left == []


def test_a_forked_child_of_a_rank_that_lives_on_does_not_hold_up_the_cell(kernel: TaggedKernel):
    cell = kernel.ok(
        "%%distributed --nproc 2\nimport os, time\nif os.fork() == 0:\n    time.sleep(600)\nprint('parent done')"
    )
    assert "[0-1] parent done" in cell.text
    assert eventually(lambda: kernel.below_forkserver() == [])


def test_a_kernel_that_fails_to_draw_ends_the_run(kernel: TaggedKernel):
    kernel.ok("from air_nb.view.cell import CellView\nfeed = CellView.feed\nCellView.feed = lambda *args: 1 / 0")
    cell = kernel.run("%%distributed --nproc 2\nimport time\nprint('go')\ntime.sleep(600)")
    kernel.ok("CellView.feed = feed")
    assert cell.error is not None
    assert cell.error["ename"] == "ZeroDivisionError"
    assert kernel.last_record()["state"] == "KILLED"
    assert "drew" in kernel.last_record()["reason"]


def test_a_huge_message_does_not_reach_the_record(kernel: TaggedKernel):
    cell = kernel.run("%%distributed --nproc 2\nraise ValueError('x' * 30_000_000)")
    assert cell.error is not None
    assert "characters left out" in cell.traceback
    assert len(cell.traceback) < 1_000_000
