"""Ends this process when the one that started it is gone. Runs in the sampling process, on a thread of its own.

The end of stdin alone is not enough: a child that the kernel forked (a loader worker, `os.fork` in a cell) holds the
other end of the pipe and can outlive the kernel. PR_SET_PDEATHSIG is no cure: it fires when the creating *thread* ends,
and cells may run in threads. So the thread waits for whichever comes first, the end of the pipe or of the process, and
it is a thread because the main one may hang in the driver.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from pathlib import Path

__all__ = ["exit_with_parent", "start_ticks"]


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with the pid this names one process for good (proc(5)).

    Args:
        pid: Process id.

    Returns:
        None if there is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The program's name is in parentheses and may hold spaces and parentheses itself; field 22 is the 20th after it.
    return int(stat.rpartition(")")[2].split()[19])


def exit_with_parent(pid: int, ticks: int, stdin: int) -> None:
    """From now on, exit at once when that process ends or when nobody holds the other end of stdin.

    Args:
        pid: Process id of the process to go with.
        ticks: Its `start_ticks`, so that a process that got the number later is not taken for it.
        stdin: Descriptor of the reading end of a pipe. It is watched, not read.
    """
    watched = select.poll()
    watched.register(stdin, 0)  # no event but the hang-up, which poll(2) always reports
    with contextlib.suppress(ProcessLookupError):
        watched.register(os.pidfd_open(pid), select.POLLIN)
    if start_ticks(pid) != ticks:
        os._exit(0)
    threading.Thread(target=_exit_after, args=(watched,), name="air_nb-sampler-lifeline", daemon=True).start()


def _exit_after(watched: select.poll) -> None:
    watched.poll()
    os._exit(0)
