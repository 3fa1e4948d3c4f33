"""What the control group (version 2) of this process may use, where it tells.

A container has the machine's /proc: psutil shows the 1 TB of the host, while the kernel is killed at the 64 GB that
were asked for. Version 1 is not read: the distributions that had it only are out of support.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["CgroupLimits", "MemoryLimit"]

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest limit above this process, and what is in use of it, without file caches that would be given up."""

    used_bytes: int
    total_bytes: int


class CgroupLimits:
    """Reads the limits of the group of this process and of those above it, each time anew: they can be changed.

    Args:
        root: Where the groups are mounted.
        own: Text of /proc/self/cgroup; by default it is read.
    """

    def __init__(self, root: Path = _ROOT, own: str | None = None) -> None:
        self._groups = _groups(root, _read(Path("/proc/self/cgroup")) if own is None else own)

    def memory(self) -> MemoryLimit | None:
        """None if there is no limit."""
        limits = [(int(text), group) for group in self._groups if (text := _read(group / "memory.max")).isdecimal()]
        if not limits:
            return None
        total, group = min(limits, key=lambda limit: limit[0])
        current = _read(group / "memory.current")
        if not current.isdecimal():
            return None
        cache = _fields(group / "memory.stat").get("inactive_file", 0)
        return MemoryLimit(max(0, int(current) - cache), total)

    def cpus(self) -> float | None:
        """CPUs' worth of time; None if there is no limit."""
        found = self._cpu_limit()
        return None if found is None else found[0]

    def cpu_used_s(self) -> float | None:
        """CPU seconds used so far by the group that has the limit; None without one."""
        found = self._cpu_limit()
        used = None if found is None else _fields(found[1] / "cpu.stat").get("usage_usec")
        return None if used is None else used / 1e6

    def _cpu_limit(self) -> tuple[float, Path] | None:
        limits = []
        for group in self._groups:
            quota, _, period = _read(group / "cpu.max").partition(" ")
            if quota.isdecimal() and period.isdecimal():
                limits.append((int(quota) / int(period), group))
        return min(limits, key=lambda limit: limit[0], default=None)


def _groups(root: Path, own: str) -> list[Path]:
    """This process's group and those above, as far as they can be seen from here."""
    line = next((line for line in own.splitlines() if line.startswith("0::/")), None)
    if line is None:
        return []
    group = root / line.removeprefix("0::/")
    # A container without a namespace for its groups sees the host's path here, and its own group at the root.
    above = (group, *group.parents)
    # One outside the namespace has a path with "..": nothing of it can be seen from here.
    return [each for each in above if each.is_relative_to(root) and ".." not in each.parts and each.is_dir()]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the root has no limits, and a container may hide them
        return ""


def _fields(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}  # noqa: PLR2004 - name and value
