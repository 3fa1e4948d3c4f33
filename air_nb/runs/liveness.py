"""Is a process still the one that we know, and what to do when it ends? A pid alone may be a stranger's by now."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessId", "call_when_gone"]


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process: its pid and its start time in clock ticks since boot (``/proc/<pid>/stat``, field 22)."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this pid now; None if there is none, or only a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The program's name is in parentheses and may hold both spaces and parentheses; field 22 is the 20th after.
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

    def send_signal(self, number: int) -> bool:
        """Signal exactly this process; False if it has ended.

        Raises:
            PermissionError: It is another user's.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.is_alive():  # asked after the pidfd was opened: it can't become another process any more
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def call_when_gone(parent: ProcessId, lifeline: int, then: Callable[[], object], *, name: str) -> None:
    """Call a function when a process has ended or nobody holds the other end of a pipe, whichever comes first.

    The end of the pipe alone is not enough: a child that the kernel forked (a loader worker, ``os.fork`` in a cell)
    holds its other end and can outlive the kernel. PR_SET_PDEATHSIG is no cure: it fires when the creating *thread*
    ends, and cells may run in threads. It is a thread because the main one may hang: in an import, in a driver.

    Args:
        parent: The process to watch.
        lifeline: Reading end of the pipe. It is watched, not read.
        then: Called on the watching thread, or at once on this one if the process is gone already.
        name: Name of the thread.
    """
    watched = select.poll()
    watched.register(lifeline, 0)  # no event but the hang-up, which poll(2) always reports
    with contextlib.suppress(ProcessLookupError):
        watched.register(os.pidfd_open(parent.pid), select.POLLIN)
    if not parent.is_alive():  # asked after the pidfd was opened: from now on it can't be mistaken for another
        then()
        return

    def watch() -> None:
        watched.poll()
        then()

    threading.Thread(target=watch, name=name, daemon=True).start()
