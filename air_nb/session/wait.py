"""Waits for a run on the calling thread: output, events and interrupts through one ``select``.

The thread that launched draws everything itself. That is what puts output into the right cell, also under ``%%capture``
and from a thread of the user's own. The rank's files are followed by inotify; a rank is never slowed down.
"""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING

from inotify_simple import INotify, flags

from air_nb.protocol.events import RankEnded
from air_nb.protocol.messages import Done, Exited, Interrupt, Kill, Refused, RunState
from air_nb.runs.logs import RankLogReader

if TYPE_CHECKING:
    from air_nb.launch.client import LauncherClient, RunEvents
    from air_nb.runs.directory import RunDirectory
    from air_nb.session.interrupts import InterruptCounter
    from air_nb.view.cell import CellView

__all__ = ["RunWaiter"]

_READ_PAUSE_S = 0.02  # a flood is taken in pieces; the first line after a pause is drawn at once
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
        self._give_up_at: float | None = None
        self._inotify = INotify()
        self._inotify.add_watch(os.fspath(directory.path), flags.MODIFY)
        self._readers = [RankLogReader(directory, rank) for rank in range(nproc)]
        self._next_read = 0.0
        self._changed = True

    def wait(self) -> Done:
        """Draw until the run has ended, and all of its output."""
        try:
            done = self._loop()
            for reader in self._readers:
                self._end_rank(reader)
            return done
        finally:
            for reader in self._readers:
                reader.close()
            self._inotify.close()

    def _loop(self) -> Done:
        while True:
            self._select()
            self._forward_interrupts()
            now = time.monotonic()
            if self._changed and now >= self._next_read:
                self._changed = self._read_all()
                self._next_read = now + _READ_PAUSE_S
            for event in self._events.take():
                if isinstance(event, Exited):
                    self._end_rank(self._readers[event.rank])
                elif isinstance(event, Done):
                    return event
                elif isinstance(event, Refused):
                    return Done(event.run_id, RunState.FAILED, reason=event.reason)
            self._view.tick()

    def _select(self) -> None:
        """Until something happens. While reading is paused, inotify is left alone: a flood would wake us for nothing."""
        now = time.monotonic()
        paused = now < self._next_read
        waits = [self._view.timeout()]
        if self._changed or paused:
            waits.append(max(0.0, self._next_read - now))
        if self._give_up_at is not None:
            waits.append(max(0.0, self._give_up_at - now))
        bounds = [wait for wait in waits if wait is not None]
        watched = [self._events.reader] if paused else [self._events.reader, self._inotify.fd]
        ready, _, _ = select.select(watched, [], [], min(bounds) if bounds else None)
        if self._events.reader in ready:
            self._events.drain()
        if self._inotify.fd in ready:
            os.read(self._inotify.fd, 1 << 16)
            self._changed = True

    def _read_all(self) -> bool:
        """Whether there may be more to read at once."""
        more = False
        for reader in self._readers:
            found = reader.read()
            if found:
                self._view.feed(found)
                more = True
        return more

    def _end_rank(self, reader: RankLogReader) -> None:
        while found := reader.read(final=True):
            self._view.feed(found)
        self._view.feed([RankEnded(reader.rank)])

    def _forward_interrupts(self) -> None:
        if self._interrupts.count > self._sent:
            run_id = self._directory.run_id
            self._launcher.send(Interrupt(run_id) if self._sent == 0 else Kill(run_id))
            self._sent = self._interrupts.count
            self._give_up_at = time.monotonic() + _STUCK_S
        if self._give_up_at is not None and time.monotonic() >= self._give_up_at:
            self._launcher.kill()  # it does not answer; its lifelines end everything below it
            self._give_up_at = None
