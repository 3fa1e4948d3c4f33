"""Whose processes hold the GPUs: ranks of runs, this kernel, strangers. The table and the panel say what is said here.

A process below a rank counts as that rank (a loader worker, a compiler), one below the kernel as the kernel. Runs in
the kernel, on the caller's thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from air_nb.monitor.text import process_label
from air_nb.runs.index import RunIndex, local_roots
from air_nb.runs.liveness import ProcessId

if TYPE_CHECKING:
    from air_nb.monitor.gpu_report import GpuProcess, GpuReport
    from air_nb.runs.directory import RunRecord

__all__ = ["Holder", "HolderKind", "Holders"]

_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of Linux: the inode of the machine's own


class HolderKind(StrEnum):
    """What a process is to the kernel that asks."""

    RANK = "rank"
    """A rank of a run that this kernel has launched, or a process below it."""
    OTHER_RUN = "other_run"
    """A rank of a run that another notebook or a script of this user has launched, or a process below it."""
    THIS_KERNEL = "this_kernel"
    """This kernel, or a process below it that belongs to no rank."""
    STRANGER = "stranger"
    """Anything else, of this user or another."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who a process is.

    Attributes:
        pid: Its id, as the driver numbers it.
        kind: What it is to this kernel.
        label: What to call it, such as "rank 2 of swift-otter" or "pid 4711 python of alice".
        run_id: Run of the rank that it is or belongs to.
        rank: That rank's number.
    """

    pid: int
    kind: HolderKind
    label: str
    run_id: str | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class _Rank:
    record: RunRecord
    rank: int


class Holders:
    """Tells whose a process is; keeps what was read of run directories and of parents. One thread at a time.

    Args:
        runs: Where live runs are looked up; this machine's.
    """

    def __init__(self, runs: RunIndex | None = None) -> None:
        self._runs = runs or RunIndex(local_roots())
        self._lines: dict[ProcessId, tuple[ProcessId, ...]] = {}
        self._launched_by: dict[ProcessId, str] = {}

    def of(self, report: GpuReport) -> dict[int, Holder]:
        """Name all processes of a report, by pid."""
        processes = {process.pid: process for gpu in report.gpus for process in gpu.processes}
        if not processes:
            return {}
        ranks = _ranks(self._runs.live())
        this = ProcessId.own()
        lines = {pid: self._line(pid) for pid in processes}
        # A process keeps the parents that it had first: below a rank that has ended since, it is still that rank's.
        self._lines = {line[0]: line for line in lines.values() if line}
        return {pid: self._holder(process, lines[pid], ranks, this) for pid, process in processes.items()}

    def _holder(
        self, process: GpuProcess, line: tuple[ProcessId, ...], ranks: dict[ProcessId, _Rank], this: ProcessId
    ) -> Holder:
        found = next((ranks[each] for each in line if each in ranks), None) or _rank_of_group(process.pid, ranks)
        if found is not None:
            return self._rank_holder(process.pid, found, this)
        if this in line:
            return Holder(process.pid, HolderKind.THIS_KERNEL, "this kernel")
        return Holder(process.pid, HolderKind.STRANGER, _stranger(process))

    def _rank_holder(self, pid: int, found: _Rank, this: ProcessId) -> Holder:
        record = found.record
        label = f"rank {found.rank} of {record.name}"
        if record.kernel == this:
            return Holder(pid, HolderKind.RANK, label, record.run_id, found.rank)
        other = f"{label} ({self._launcher_of(record)})"
        return Holder(pid, HolderKind.OTHER_RUN, other, record.run_id, found.rank)

    def _launcher_of(self, record: RunRecord) -> str:
        if record.kernel is None or not record.kernel.is_alive():
            return "its notebook has ended"
        if record.kernel not in self._launched_by:
            self._launched_by = {record.kernel: _what_is(record.kernel.pid), **self._launched_by}
        return self._launched_by[record.kernel]

    def _line(self, pid: int) -> tuple[ProcessId, ...]:
        """The process and those above it, nearest first; empty if it can't be seen from here."""
        process = ProcessId.of(pid)
        if process is None:
            return ()
        if process not in self._lines:
            try:
                above = [ProcessId.of(parent.pid) for parent in psutil.Process(pid).parents()]
            except psutil.Error:  # it has ended just now
                above = []
            self._lines[process] = (process, *(each for each in above if each is not None))
        return self._lines[process]


def _ranks(records: list[RunRecord]) -> dict[ProcessId, _Rank]:
    return {
        process: _Rank(record, rank)
        for record in records
        for rank, process in enumerate(record.ranks)
        if process is not None
    }


def _rank_of_group(pid: int, ranks: dict[ProcessId, _Rank]) -> _Rank | None:
    """A rank leads a process group of its own, in which what it leaves behind stays when it gets another parent."""
    try:
        group = os.getpgid(pid)
    except OSError:
        return None
    return next((found for process, found in ranks.items() if process.pid == group), None)


def _what_is(kernel_pid: int) -> str:
    try:
        command = psutil.Process(kernel_pid).cmdline()
    except psutil.Error:
        command = []
    return "another notebook" if any("ipykernel" in word for word in command) else "another script"


def _stranger(process: GpuProcess) -> str:
    label = process_label(process)
    if process.name or process.user:
        return label
    if _exists(process.pid):
        return f"{label} of another user"
    # In a container the driver still counts in the host's numbers.
    return f"{label} (outside this container)" if _is_contained() else f"{label} (ended)"


def _exists(pid: int) -> bool:
    """Not psutil.pid_exists, which looks into /proc: mounted with hidepid, that hides the processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_contained() -> bool:
    return Path("/proc/self/ns/pid").stat().st_ino != _FIRST_PID_NAMESPACE
