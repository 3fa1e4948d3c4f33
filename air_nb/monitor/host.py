"""CPU, memory and disk of this machine, or of the container that the kernel may use of it.

Unknown is None, never 0. Runs in the kernel, on the caller's thread.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from air_nb.monitor.cgroup import CgroupLimits
from air_nb.monitor.gpu_report import utc_now
from air_nb.runs.paths import home_path, is_network_path

__all__ = ["HostSample", "HostSampler"]

_FIRST_PERIOD_S = 0.2


@dataclass(frozen=True, slots=True)
class HostSample:
    """The machine at one moment.

    Attributes:
        at: When it was sampled (UTC).
        cpu_percent: Part of the CPUs that was busy since the sample before, the first time in 0.2 s; None if unknown.
        cpu_count: CPUs that this process may use, a part of one counted as one.
        memory_used_bytes: Without caches that would be given up.
        memory_total_bytes: Of the machine, or the limit of the container.
        disk_path: A directory on the file system that holds air_nb's home.
        disk_used_bytes: Of that file system; None if it is a network's.
        disk_total_bytes: Likewise.
    """

    at: datetime
    cpu_percent: float | None = None
    cpu_count: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_path: str | None = None
    disk_used_bytes: int | None = None
    disk_total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _CpuTime:
    """What the CPUs have done so far, in seconds: `busy_s` of the `could_s` that they could have."""

    busy_s: float
    could_s: float


class HostSampler:
    """Samples this machine; keeps the CPU times of the last sample. One thread at a time."""

    def __init__(self) -> None:
        self._limits = CgroupLimits()
        self._before: _CpuTime | None = None
        self._disk: Path | None = None
        self._is_disk_asked = True

    def sample(self) -> HostSample:
        """Sample now. Never waits for a network file system."""
        used, total = self._memory()
        disk_used, disk_total = self._disk_use()
        return HostSample(
            at=utc_now(),
            cpu_percent=self._cpu_percent(),
            cpu_count=self._cpu_count(),
            memory_used_bytes=used,
            memory_total_bytes=total,
            disk_path=str(self._disk),
            disk_used_bytes=disk_used,
            disk_total_bytes=disk_total,
        )

    def _cpu_percent(self) -> float | None:
        if self._before is None:  # the panel opens with a value, not with ten seconds of none
            self._before = self._cpu_time()
            time.sleep(_FIRST_PERIOD_S)
        before, self._before = self._before, self._cpu_time()
        if self._before.could_s <= before.could_s:
            return None
        busy = (self._before.busy_s - before.busy_s) / (self._before.could_s - before.could_s)
        return min(100.0, max(0.0, 100 * busy))

    def _cpu_time(self) -> _CpuTime:
        """Not psutil.cpu_percent: its memory of the last call is the process's, and the user's code may call it too."""
        cpus, used_s = self._limits.cpus(), self._limits.cpu_used_s()
        if cpus is not None and used_s is not None:
            return _CpuTime(used_s, time.monotonic() * cpus)
        allowed = os.sched_getaffinity(0)
        times = [each for number, each in enumerate(psutil.cpu_times(percpu=True)) if number in allowed]
        # guest is counted in user already, and waiting for a disk is no work of a CPU
        could_s = sum(sum(each) - each.guest - each.guest_nice for each in times)
        return _CpuTime(could_s - sum(each.idle + each.iowait for each in times), could_s)

    def _cpu_count(self) -> int:
        allowed = len(os.sched_getaffinity(0))
        cpus = self._limits.cpus()
        return allowed if cpus is None else min(allowed, max(1, -int(-cpus // 1)))

    def _memory(self) -> tuple[int, int]:
        machine = psutil.virtual_memory()
        limit = self._limits.memory()
        if limit is not None and limit.total_bytes < machine.total:
            return limit.used_bytes, limit.total_bytes
        return machine.total - machine.available, machine.total

    def _disk_use(self) -> tuple[int | None, int | None]:
        """No statvfs of a network's: where its server has gone it never returns, and no thread can be freed from it."""
        if self._disk is None:
            self._disk = _existing(home_path())
            self._is_disk_asked = not is_network_path(self._disk)
        if not self._is_disk_asked:
            return None, None
        try:
            usage = psutil.disk_usage(str(self._disk))
        except OSError:
            return None, None
        return usage.used, usage.total


def _existing(path: Path) -> Path:
    return next((each for each in (path, *path.parents) if each.exists()), Path("/"))
