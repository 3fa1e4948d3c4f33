"""Kernel, launcher or forkserver die: nothing of ours outlives them, and the next cell works."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from air_nb.runs.directory import all_runs
from air_nb.runs.paths import node_local
from air_nb.runs.retention import close_dead_runs
from tests.faults.conftest import PROGRAMS, TaggedKernel
from tests.support.wait import eventually

_LEAVER = """%%distributed --nproc 2
import os, sys, time
sys.path.insert(0, {programs!r})
import leaver
held = leaver.leave({directory!r})
print("left")
time.sleep(600)
"""
_FORK = """
import os, multiprocessing, time
pool = multiprocessing.get_context("fork").Pool(1)
child = os.fork()
if child == 0:
    time.sleep(120)
    os._exit(0)
print("forked", child)
"""


def _launcher_directories(pid: int) -> list[Path]:
    return list(node_local().glob(f"launcher-{pid}-*"))


def _start_leaver(kernel: TaggedKernel, directory: Path):
    cell = kernel.start(_LEAVER.format(programs=os.fspath(PROGRAMS), directory=str(directory)))
    kernel.follow(cell, until=lambda cell: "[0-1] left" in cell.text or cell.text.count("] left") == 2)
    return cell


def _record(run_id: str):
    return next(record for _, record in all_runs() if record.run_id == run_id)


@pytest.mark.parametrize("how", ["killed", "killed, its forked children alive", "restarted", "shut down"])
def test_nothing_outlives_the_kernel(fresh_kernel: TaggedKernel, tmp_path: Path, how: str):
    kernel = fresh_kernel
    if "forked" in how:
        kernel.ok(_FORK)
    _start_leaver(kernel, tmp_path)
    run_id = kernel.last_record()["run_id"]
    assert eventually(lambda: _record(run_id).state == "RUNNING", 10)  # written when all ranks run
    record = _record(run_id)
    ranks = record.ranks
    assert all(ranks)
    pid = kernel.kernel.pid
    before = kernel.processes()
    assert len(before) >= 2 * 6 + 3, before  # rank, 2 loader workers, 2 sleeps, daemon; kernel, launcher, forkserver
    assert record.launcher is not None
    own_children = {process.pid for process in psutil.Process(pid).children() if process.pid != record.launcher.pid}
    if how == "restarted":
        kernel.kernel.restart()
    elif how == "shut down":
        kernel.kernel.manager.shutdown_kernel(now=False)
    else:
        kernel.kernel.kill()
    assert eventually(lambda: not any(rank and rank.is_alive() for rank in ranks))
    spared = own_children | ({kernel.kernel.pid} if how == "restarted" else set())

    def left() -> list[psutil.Process]:
        return [process for process in kernel.processes() if process.pid not in spared and process in before]

    assert eventually(lambda: not left()), left()
    assert eventually(lambda: _record(run_id).state == "KILLED"), _record(run_id)
    assert _record(run_id).reason in ("the kernel ended", "interrupted")  # a graceful shutdown interrupts first
    assert eventually(lambda: not _launcher_directories(pid))
    for child in own_children:
        if psutil.pid_exists(child):
            os.kill(child, signal.SIGKILL)
    if how == "restarted":
        kernel.ok("%load_ext air_nb")
        assert "[0-1] again" in kernel.ok("%%distributed --nproc 2\nprint('again')").text


def test_a_kernel_killed_while_the_launcher_warms_up_leaves_nothing(cold_kernel: TaggedKernel):
    assert eventually(lambda: len(cold_kernel.processes()) >= 2)
    cold_kernel.kernel.kill()
    assert eventually(lambda: not cold_kernel.processes()), cold_kernel.processes()
    assert eventually(lambda: not _launcher_directories(cold_kernel.kernel.pid))


@pytest.mark.parametrize("victim", ["launcher", "forkserver"])
def test_the_cell_ends_with_a_clear_error_and_the_next_one_has_a_new_launcher(
    kernel: TaggedKernel, tmp_path: Path, victim: str
):
    kernel.ok("%%distributed --nproc 1 --quiet\npass")
    process = kernel.launcher() if victim == "launcher" else kernel.forkserver()
    old = kernel.launcher().pid
    cell = _start_leaver(kernel, tmp_path)
    before = kernel.processes()
    mine = {kernel.kernel.pid}  # and the sampler's, found while all are alive: what dies has no command line
    mine |= {other.pid for other in before if "air_nb.monitor" in " ".join(other.cmdline())}
    process.kill()
    kernel.follow(cell, timeout_s=30)
    assert cell.error is not None
    assert cell.error["ename"] == "RunError"
    assert "was killed by SIGKILL" in cell.traceback
    assert "rank 0" not in cell.traceback

    def left() -> list[psutil.Process]:
        return [other for other in kernel.processes() if other in before and other.pid not in mine]

    assert eventually(lambda: not left()), left()
    assert kernel.last_record()["state"] == "FAILED"
    assert "was killed by SIGKILL" in kernel.last_record()["reason"]
    cell = kernel.ok("%%distributed --nproc 2\nprint('again')")
    assert "[0-1] again" in cell.text
    assert "new launcher" in cell.text
    assert kernel.launcher().pid != old


def test_a_launcher_killed_while_it_warms_up_is_replaced(cold_kernel: TaggedKernel):
    cold_kernel.launcher().kill()
    cell = cold_kernel.run("%%distributed --nproc 2\nprint('first')")
    if cell.reply_status == "error":  # the death was not noticed yet when the cell began
        assert "was killed by SIGKILL" in cell.traceback
        assert len(cell.traceback.splitlines()) < 30
        cell = cold_kernel.ok("%%distributed --nproc 2\nprint('second')")
    assert "FINISHED" in cell.text


@pytest.mark.slow
def test_a_launcher_that_hangs_does_not_hold_the_cell_for_ever(fresh_kernel: TaggedKernel):
    kernel = fresh_kernel
    launcher = kernel.launcher()
    cell = kernel.start("%%distributed --nproc 2\nimport time\nprint('go')\ntime.sleep(600)")
    kernel.follow(cell, until=lambda cell: "go" in cell.text)
    launcher.suspend()
    kernel.kernel.interrupt()
    kernel.follow(cell, timeout_s=60)
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert kernel.last_record()["state"] == "KILLED"
    assert "[0-1] again" in kernel.ok("%%distributed --nproc 2\nprint('again')").text


def test_a_run_whose_kernel_and_launcher_died_together_is_closed_by_the_next_kernel(fresh_kernel: TaggedKernel):
    kernel = fresh_kernel
    cell = kernel.start("%%distributed --nproc 2 --name doomed\nimport time\nprint('go')\ntime.sleep(600)")
    kernel.follow(cell, until=lambda cell: "go" in cell.text)
    launcher = next(record for _, record in all_runs() if record.name == "doomed").launcher
    assert launcher is not None
    os.kill(launcher.pid, signal.SIGKILL)
    kernel.kernel.kill()
    assert eventually(lambda: not kernel.processes()), kernel.processes()
    close_dead_runs()
    assert next(record for _, record in all_runs() if record.name == "doomed").state == "KILLED"
