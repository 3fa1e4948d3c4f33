"""Was it the kernel's OOM killer that ended a process? Read from its own log and counters, as far as they are readable.

The log (/dev/kmsg) names the process, but mostly only root may read it. Everybody may read the counters: of the control
group that the ranks are in, and of the whole machine.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

__all__ = ["OomWatch", "counter_paths", "killed_in_log", "kills_counted"]

_COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_KILLED = re.compile(r"[Oo]ut of memory: Killed process (?P<pid>\d+) .*?anon-rss:(?P<kib>\d+)kB")
_RECORD_BYTES = 8192  # a longer record of /dev/kmsg can't be read at all
_MACHINE = Path("/proc/vmstat")


def kills_counted(text: str) -> int | None:
    """Number of OOM kills in ``/proc/vmstat``, ``memory.events`` (cgroup 2) or ``memory.oom_control`` (cgroup 1)."""
    found = _COUNTER.search(text)
    return int(found[1]) if found else None


def killed_in_log(log: str, pid: int) -> str | None:
    """What the kernel's log says of the death of a process, if it does."""
    for record in _KILLED.finditer(log):
        if int(record["pid"]) == pid:
            return f"the kernel's log says that it was killed holding {int(record['kib']) / 2**20:.1f} GiB"
    return None


def counter_paths(groups: str) -> list[Path]:
    """Where the counters of a control group may be.

    Args:
        groups: Text of ``/proc/self/cgroup``.
    """
    paths = []
    for line in groups.splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            paths += [Path(root + group) / "memory.events" for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")]
        elif "memory" in controllers.split(","):
            paths.append(Path(f"/sys/fs/cgroup/memory{group}") / "memory.oom_control")
    return paths


class OomWatch:
    """Remembers what was counted and logged before; asked when a process of this one's control group has died.

    Args:
        log: The kernel's log.
        groups: Control groups of this process.
        machine: Counters of the machine.
    """

    def __init__(
        self,
        log: Path = Path("/dev/kmsg"),
        groups: Path = Path("/proc/self/cgroup"),
        machine: Path = _MACHINE,
    ) -> None:
        self._machine = machine
        self._paths = [*counter_paths(_read(groups)), machine]
        self._before = self._counts()
        self._log: int | None = None
        with suppress(OSError):  # not root
            self._log = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def explain(self, pid: int) -> str | None:
        """Why a process was killed by SIGKILL, as far as the kernel tells; None if it tells nothing."""
        logged = killed_in_log(self._read_log(), pid)
        if logged is not None:
            return f"the system ran out of memory: {logged}"
        now = self._counts()
        grown = [path for path, count in now.items() if count > self._before.get(path, count)]
        if grown:
            whose = "the machine" if grown == [self._machine] else "the control group that ranks are in"
            return f"the system ran out of memory: the kernel killed a process of {whose} for it while the run was on"
        if self._machine in now:
            return "not for lack of memory as the kernel sees it: somebody, or a guard such as Slurm's, sent kill -9"
        return None

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _counts(self) -> dict[Path, int]:
        counts = {path: kills_counted(_read(path)) for path in self._paths}
        return {path: count for path, count in counts.items() if count is not None}

    def _read_log(self) -> str:
        records = []
        while self._log is not None:
            try:
                record = os.read(self._log, _RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten before they were read: the next read goes on
                continue
            except OSError:  # no more for now
                break
            if not record:
                break
            records.append(record)
        return b"".join(records).decode(errors="replace")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # this kind of control group is not mounted here, or not for us to read
        return ""
