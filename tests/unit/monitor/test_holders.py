"""Real processes below and beside this one; the records of runs are made up."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from air_nb.monitor import holders as holders_module
from air_nb.monitor.gpu_report import DriverState, GpuProcess, GpuReport, GpuSample, utc_now
from air_nb.monitor.holders import Holder, HolderKind, Holders
from air_nb.protocol.messages import RunState
from air_nb.runs.directory import RunRecord
from air_nb.runs.liveness import ProcessId

NO_PID = 4_000_000  # above pid_max of a small machine

# Prints its child's pid; the child outlives it when its stdin ends.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""


class Runs:
    def __init__(self):
        self.added = []

    def live(self):
        return self.added

    def add(self, ranks, *, kernel, name="swift-otter-41", run_id="run-1"):
        record = RunRecord(run_id, name, RunState.RUNNING, 0.0, len(ranks), "cuda", kernel=kernel, ranks=ranks)
        self.added.append(record)


@pytest.fixture
def runs():
    return Runs()


@pytest.fixture
def holders(runs):
    return Holders(runs)


def close_stdin(process):
    """It ends with that."""
    process.stdin.close()


@contextmanager
def family(*, leads_group=False):
    """A process with a child: (pid, child's pid, a function that ends the parent)."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0 if leads_group else None,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            yield parent, child
        finally:
            close_stdin(parent)
            os.kill(child, signal.SIGKILL)


def report(*processes):
    listed = tuple(each if isinstance(each, GpuProcess) else GpuProcess(each, name="python") for each in processes)
    return GpuReport(utc_now(), DriverState.OK, gpus=(GpuSample(0, "GPU-0", processes=listed),))


def test_without_processes_no_run_directory_is_read(runs, holders, monkeypatch):
    monkeypatch.setattr(runs, "live", lambda: pytest.fail("nobody to look for"))
    assert holders.of(report()) == {}


def test_ranks_of_this_kernel_and_what_is_below_them_are_named_by_run_and_rank(runs, holders):
    with family() as (parent, worker):
        runs.add([None, ProcessId.of(parent.pid)], kernel=ProcessId.own())
        rank = (HolderKind.RANK, "rank 1 of swift-otter-41", "run-1", 1)
        assert holders.of(report(parent.pid, worker)) == {pid: Holder(pid, *rank) for pid in (parent.pid, worker)}


@pytest.mark.parametrize(
    "command, whose",
    [
        ([sys.executable, "-c", "import sys; sys.stdin.read()", "ipykernel_launcher"], "another notebook"),
        ([sys.executable, "-c", "import sys; sys.stdin.read()", "train.py"], "another script"),
    ],
)
def test_ranks_of_others_say_whose_they_are(runs, holders, command, whose):
    with family() as (parent, worker), subprocess.Popen(command, stdin=subprocess.PIPE) as kernel:
        runs.add([ProcessId.of(parent.pid)], kernel=ProcessId.of(kernel.pid), name="calm-owl-7")
        rank = (HolderKind.OTHER_RUN, f"rank 0 of calm-owl-7 ({whose})", "run-1", 0)
        assert holders.of(report(worker)) == {worker: Holder(worker, *rank)}
        close_stdin(kernel)


def test_a_rank_whose_notebook_has_ended_says_so(runs, holders):
    with family() as (parent, _):
        runs.add([ProcessId.of(parent.pid)], kernel=ProcessId(parent.pid, 1))
        (holder,) = holders.of(report(parent.pid)).values()
        assert (holder.kind, holder.label) == (
            HolderKind.OTHER_RUN,
            "rank 0 of swift-otter-41 (its notebook has ended)",
        )


def test_this_kernel_and_what_is_below_it_are_this_kernel(holders):
    with family() as (parent, child):
        found = holders.of(report(os.getpid(), parent.pid, child))
        assert {(holder.kind, holder.label) for holder in found.values()} == {(HolderKind.THIS_KERNEL, "this kernel")}


def test_a_pid_that_was_a_ranks_is_not_taken_for_the_rank(runs, holders):
    with family() as (parent, child):
        runs.add([ProcessId(parent.pid, 1)], kernel=ProcessId.own())
        assert holders.of(report(child))[child].kind is HolderKind.THIS_KERNEL


def test_what_a_rank_left_behind_is_still_the_ranks(runs, holders):
    with family(leads_group=True) as (parent, orphan):
        runs.add([ProcessId.of(parent.pid)], kernel=ProcessId.own())
        close_stdin(parent)
        parent.wait()
        assert holders.of(report(orphan))[orphan].rank == 0  # by its process group


def test_what_was_seen_below_a_rank_is_the_ranks_after_its_end(runs, holders):
    with family() as (parent, orphan):
        runs.add([ProcessId.of(parent.pid)], kernel=ProcessId.own())
        assert holders.of(report(orphan))[orphan].rank == 0
        close_stdin(parent)
        parent.wait()
        assert holders.of(report(orphan))[orphan].rank == 0
    holders.of(report(os.getpid()))
    assert [process.pid for process in holders._lines] == [os.getpid()]


def test_a_process_that_gets_its_run_later_is_named_then(runs, holders):
    with family() as (parent, child):
        assert holders.of(report(child))[child].kind is HolderKind.THIS_KERNEL
        runs.add([ProcessId.of(parent.pid)], kernel=ProcessId.own())
        assert holders.of(report(child))[child].kind is HolderKind.RANK


@pytest.mark.parametrize(
    "process, is_contained, label",
    [
        (GpuProcess(1, 5, "python", "alice"), False, "pid 1 python of alice"),
        (GpuProcess(1, 5, "Xorg"), False, "pid 1 Xorg"),
        (GpuProcess(1), True, "pid 1 of another user"),
        (GpuProcess(NO_PID), True, f"pid {NO_PID} (outside this container)"),
        (GpuProcess(NO_PID), False, f"pid {NO_PID} (ended)"),
    ],
)
def test_strangers_are_described_as_far_as_they_can_be_seen(holders, monkeypatch, process, is_contained, label):
    monkeypatch.setattr(holders_module, "_is_contained", lambda: is_contained)
    expected = Holder(process.pid, HolderKind.STRANGER, label)
    assert holders.of(report(process)) == {process.pid: expected}


def test_the_namespace_of_this_machine_can_be_read():
    assert holders_module._is_contained() in (True, False)


def test_the_same_process_on_two_gpus_is_one_holder(holders):
    gpus = tuple(GpuSample(index, f"GPU-{index}", processes=(GpuProcess(os.getpid()),)) for index in range(2))
    assert list(holders.of(GpuReport(utc_now(), DriverState.OK, gpus=gpus))) == [os.getpid()]
