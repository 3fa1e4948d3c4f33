"""Jupyter's stop button: KeyboardInterrupt in the cell, the run KILLED, nothing left, the next cell works."""

from __future__ import annotations

import shutil
import textwrap
import time

import psutil
import pytest

from air_nb.runs.directory import all_runs
from tests.faults.conftest import TaggedKernel
from tests.support.wait import eventually

_PRINT = "print('go')\n"
_CASES = {
    "python loop": _PRINT + "while True: pass",
    "sleep": _PRINT + "import time\ntime.sleep(600)",
    "input loop": _PRINT + "import time\nfor i in range(10**9):\n    time.sleep(0.01)",
    "barrier": (
        "import torch.distributed as dist, time\nfrom air_nb.runtime import init_process_group\ninit_process_group()\n"
        + _PRINT
        + "dist.barrier() if dist.get_rank() else time.sleep(600)"
    ),
    "allreduce": (
        "import torch, torch.distributed as dist, time\nfrom air_nb.runtime import init_process_group\n"
        "init_process_group()\n" + _PRINT + "dist.all_reduce(torch.ones(3)) if dist.get_rank() else time.sleep(600)"
    ),
    "caught and dropped": _PRINT + "import time\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    pass",
    "turned into another error": (
        _PRINT + "import time\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    raise ValueError('other')"
    ),
}
_STUBBORN = {
    "in C with the GIL": _PRINT + "import itertools\nsum(itertools.repeat(1, 10**12))  # never looks at signals",
    "ignores SIGINT and SIGTERM": (
        "import signal, time\nfor number in (2, 15): signal.signal(number, signal.SIG_IGN)\n"
        + _PRINT
        + "time.sleep(600)"
    ),
    "stopped": (
        "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)  # else it may come before the stop\n"
        + _PRINT
        + "os.kill(os.getpid(), signal.SIGSTOP)"
    ),
}


def _check_interrupted(kernel: TaggedKernel, cell, *, shows_stacks: bool = False) -> None:
    assert cell.reply_status == "error"
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert "RankFailedError" not in cell.text
    assert (len(cell.traceback.splitlines()) > 1) == shows_stacks, cell.traceback
    assert ("did not end within 3 s of SIGINT" in cell.traceback) == shows_stacks
    record = kernel.last_record()
    assert record["state"] == "KILLED", record
    assert kernel.below_forkserver() == []
    assert kernel.value("__import__('signal').getsignal(2).__name__") == "'default_int_handler'"
    assert "[0-1] next" in kernel.ok("%%distributed --nproc 2\nprint('next')").text


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in _CASES.items()])
def test_an_interrupt_ends_the_cell(kernel: TaggedKernel, code: str):
    cell, seconds = kernel.interrupt_when_shown(f"%%distributed --nproc 2\n{code}", "go")
    _check_interrupted(kernel, cell)
    assert seconds < 20


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in _STUBBORN.items()])
def test_an_interrupt_ends_ranks_that_do_not_listen(kernel: TaggedKernel, code: str):
    cell, seconds = kernel.interrupt_when_shown(f"%%distributed --nproc 2\n{code}", "go")
    _check_interrupted(kernel, cell, shows_stacks=True)
    assert seconds < 20


def test_a_second_interrupt_does_not_wait_for_the_first(kernel: TaggedKernel):
    code = f"%%distributed --nproc 2\n{_STUBBORN['ignores SIGINT and SIGTERM']}"
    cell, seconds = kernel.interrupt_when_shown(code, "go", times=2)
    _check_interrupted(kernel, cell)
    assert seconds < 3.5  # the ladder of one interrupt takes 4.5 s


def test_an_interrupt_right_after_the_launch_is_not_lost(kernel: TaggedKernel):
    for wait_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3):
        magic = "get_ipython().run_cell_magic('distributed', '--nproc 4', 'import time\\ntime.sleep(600)')"
        cell = kernel.start(f"print('sent')\n{magic}")
        kernel.follow(cell, until=lambda cell: "sent" in cell.text)
        time.sleep(wait_s)
        kernel.kernel.interrupt()
        kernel.follow(cell, timeout_s=30)
        assert cell.error is not None
        assert cell.error["ename"] == "KeyboardInterrupt"
        assert kernel.below_forkserver() == []
        assert kernel.last_record()["state"] != "STARTING"


def test_an_interrupt_while_the_launcher_warms_up_ends_the_wait_and_not_the_warming(cold_kernel: TaggedKernel):
    kernel = cold_kernel
    cell = kernel.start("print('sent')\nget_ipython().run_cell_magic('distributed', '--nproc 2', 'print(1)')")
    kernel.follow(cell, until=lambda cell: "sent" in cell.text)
    time.sleep(0.3)
    kernel.kernel.interrupt()
    kernel.follow(cell, timeout_s=30)
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert "warming up" in cell.traceback
    assert len(cell.traceback.splitlines()) == 1
    pid = kernel.launcher().pid
    assert kernel.last_record()["state"] == "KILLED"
    assert "[0-1] 1" in kernel.ok("%%distributed --nproc 2\nprint(1)").text
    assert kernel.launcher().pid == pid


def test_an_interrupt_during_a_flood_of_output_ends_it(kernel: TaggedKernel):
    code = "%%distributed --nproc 2\nimport os\nblock = (b'x' * 99 + b'\\n') * 100_000\nwhile True: os.write(1, block)"
    cell = kernel.start(code)
    kernel.follow(cell, until=lambda cell: "xxx" in cell.text)
    time.sleep(1)  # the ranks are hundreds of megabytes ahead of what is drawn
    kernel.kernel.interrupt()
    kernel.follow(cell, timeout_s=60)
    _check_interrupted(kernel, cell)
    assert "MiB left out" in cell.text
    for directory, _ in all_runs()[:2]:
        shutil.rmtree(directory.path)


def test_an_interrupt_does_not_reach_the_kernels_other_children(kernel: TaggedKernel):
    """Jupyter signals the kernel's whole process group: ranks and launcher are in groups of their own."""
    code = """
    %%distributed --nproc 2
    import signal, time
    got = []
    signal.signal(signal.SIGINT, lambda *args: got.append(1))
    print('go')
    time.sleep(1)
    print('signals', len(got))
    """
    cell = kernel.start(textwrap.dedent(code).strip())
    kernel.follow(cell, until=lambda cell: "go" in cell.text)
    launcher = psutil.Process(kernel.kernel.pid).children()
    kernel.kernel.interrupt()
    kernel.follow(cell, timeout_s=30)
    assert all(process.is_running() for process in launcher)
    assert "signals 1" in cell.text  # one, from us; not a second one from Jupyter


def test_the_failure_of_a_rank_is_not_hidden_by_an_interrupt_that_comes_later(kernel: TaggedKernel):
    code = """
    %%distributed --nproc 2
    import os, signal, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ['RANK'] == '1':
        print('go')
        raise ValueError('first')
    time.sleep(600)
    """
    cell = kernel.start(textwrap.dedent(code).strip())
    kernel.follow(cell, until=lambda cell: "go" in cell.text)
    time.sleep(0.6)
    kernel.kernel.interrupt()
    kernel.follow(cell, timeout_s=30)
    assert cell.reply_status == "error"
    assert eventually(lambda: kernel.below_forkserver() == [])
    if cell.error and cell.error["ename"] == "RankFailedError":
        assert "ValueError: first" in cell.traceback
