"""Waits for a run on the calling thread: output, events and interrupts through one ``select``.

The thread that launched draws everything itself. That is what puts output into the right cell, also under ``%%capture``
and from a thread of the user's own. The rank's files are followed by inotify; a rank is never slowed down.
"""

from __future__ import annotations

import math
import os
import select
import time
from typing import TYPE_CHECKING

from inotify_simple import INotify, flags

from air_nb.protocol.events import RankEnded, RankEvent
from air_nb.protocol.messages import Done, Exited, Interrupt, Kill, Refused, RunState
from air_nb.runs.checkpoints import saves_when_stopped, stop_grace_s
from air_nb.runs.logs import RankLogReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from air_nb.launch.client import LauncherClient, RunEvents
    from air_nb.runs.directory import RunDirectory
    from air_nb.session.interrupts import InterruptCounter
    from air_nb.view.cell import CellView

__all__ = ["RunWaiter", "end_run"]

_PAUSE_S = 0.001
_FLOOD_PAUSE_S = 0.01  # a flood is taken in a hundred pieces a second
_BURST = 10.0  # reads that may come closer together: until then a line is drawn at once
_INTERRUPTED_KEEP_BYTES = 1 << 15
_END_S = 10.0
_STUCK_S = 12.0  # the stop ladder has ended long before: 3 + 1.5 s, then 5 s for processes that SIGKILL can't end


class RunWaiter:
    """Follows one run until no process of it is left.

    Args:
        directory: The run.
        nproc: Number of ranks.
        events: Its events from the launcher.
        launcher: Takes interrupts; ended by force if it does not answer them.
        view: Draws.
        interrupts: Counts SIGINT.
    """

    def __init__(
        self,
        directory: RunDirectory,
        nproc: int,
        events: RunEvents,
        launcher: LauncherClient,
        view: CellView,
        interrupts: InterruptCounter,
    ) -> None:
        self._directory = directory
        self._events = events
        self._launcher = launcher
        self._view = view
        self._interrupts = interrupts
        self._sent = 0
        self._give_up_at = math.inf
        self._inotify = INotify()
        self._inotify.add_watch(os.fspath(directory.path), flags.MODIFY | flags.MOVED_TO)
        self._readers = [RankLogReader(directory, rank) for rank in range(nproc)]
        self._last_read = -math.inf
        self._pause_s = _PAUSE_S
        self._credit = _BURST
        self._changed = True

    def wait(self, on_change: Callable[[], None]) -> Done:
        """Draw until the run has ended, and all of its output.

        Args:
            on_change: Called after files of the run directory have changed, at most a hundred times a second.
        """
        try:
            done = self._loop(on_change)
            for reader in self._readers:
                self._end_rank(reader)
            return done
        finally:
            for reader in self._readers:
                reader.close()
            self._inotify.close()

    def _loop(self, on_change: Callable[[], None]) -> Done:
        while True:
            self._select()
            self._forward_interrupts()
            now = time.monotonic()
            if self._changed and now >= self._last_read + self._pause_s:
                self._changed = self._read_all()
                on_change()
                self._spend(now)
            for event in self._events.take():
                if isinstance(event, Exited):
                    self._end_rank(self._readers[event.rank])
                elif isinstance(event, Done):
                    return event
                elif isinstance(event, Refused):
                    return Done(event.run_id, RunState.FAILED, reason=event.reason)
            self._view.tick()

    def _spend(self, now: float) -> None:
        """Each read costs one; time earns them back, so that only what lasts is slowed down."""
        earned = (now - self._last_read) / _FLOOD_PAUSE_S
        self._credit = min(_BURST, self._credit + earned) - 1.0
        self._pause_s = _PAUSE_S if self._credit > 0.0 else _FLOOD_PAUSE_S
        self._last_read = now

    def _select(self) -> None:
        """Until something happens. While reading is paused, inotify is left alone: a flood would wake us in vain."""
        now = time.monotonic()
        next_read = self._last_read + self._pause_s
        paused = now < next_read
        waits = [self._view.timeout()]
        if self._changed or paused:
            waits.append(max(0.0, next_read - now))
        if self._give_up_at < math.inf:
            waits.append(max(0.0, self._give_up_at - now))
        bounds = [wait for wait in waits if wait is not None]
        watched = [self._events.reader] if paused else [self._events.reader, self._inotify.fd]
        ready = _readable(watched, min(bounds) if bounds else None)
        if self._events.reader in ready:
            self._events.drain()
        if self._inotify.fd in ready:
            os.read(self._inotify.fd, 1 << 16)
            self._changed = True

    def _read_all(self) -> bool:
        """Whether there may be more to read at once."""
        more = False
        for reader in self._readers:
            found = self._skip(reader) + reader.read()
            if found:
                self._view.feed(found)
                more = True
        return more

    def _skip(self, reader: RankLogReader) -> list[RankEvent]:
        """Once interrupted, the end of a flood is enough: a rank writes gigabytes faster than anybody can draw them."""
        return reader.skip(_INTERRUPTED_KEEP_BYTES) if self._sent else []

    def _end_rank(self, reader: RankLogReader) -> None:
        self._view.feed(self._skip(reader))
        while found := reader.read(final=True):
            self._view.feed(found)
        self._view.feed([RankEnded(reader.rank)])

    def _forward_interrupts(self) -> None:
        if self._interrupts.count > self._sent:
            run_id = self._directory.run_id
            self._sent = self._interrupts.count
            self._launcher.send(Interrupt(run_id) if self._sent == 1 else Kill(run_id))
            if self._sent == 1 or self._give_up_at == math.inf:
                self._give_up_at = time.monotonic() + _STUCK_S + self._saving_s()
        if time.monotonic() >= self._give_up_at:
            self._launcher.kill()  # it does not answer; its lifelines end everything below it
            self._give_up_at = math.inf

    def _saving_s(self) -> float:
        """How much longer ranks may take that save a checkpoint first; says so, at the first interrupt."""
        if self._sent > 1 or not saves_when_stopped(self._directory.path):
            return 0.0
        self._view.warn("saving a checkpoint at the next step, interrupt again to stop now")
        return stop_grace_s(os.environ)


def end_run(launcher: LauncherClient, run_id: str, events: RunEvents) -> None:
    """SIGKILL every rank of a run that nobody follows any more, and wait until it is over (bounded)."""
    launcher.send(Kill(run_id, "the kernel failed while it drew the output"))
    end = time.monotonic() + _END_S
    while (left := end - time.monotonic()) > 0:
        if any(isinstance(event, Done | Refused) for event in events.take()):
            return
        if _readable([events.reader], left):
            events.drain()


def _readable(descriptors: list[int], timeout_s: float | None) -> list[int]:
    """Those that can be read; unlike ``select``, good for a kernel with more than 1,024 open files."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    ready = poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
    return [descriptor for descriptor, _ in ready]
