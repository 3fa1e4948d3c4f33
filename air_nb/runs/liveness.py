"""Is a process still the one that we know? A pid alone may have been given to a stranger since."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessId"]


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process: its pid and its start time in clock ticks since boot (``/proc/<pid>/stat``, field 22)."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this pid now; None if there is none, or only a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        after_name = stat.rpartition(")")[2].split()
        return None if after_name[0] in "ZX" else cls(pid, int(after_name[19]))

    @classmethod
    def own(cls) -> ProcessId:
        """This process."""
        this = cls.of(os.getpid())
        assert this is not None
        return this

    def is_alive(self) -> bool:
        """Whether exactly this process still runs."""
        return ProcessId.of(self.pid) == self
