"""One run that goes on: opened, forwarded while it runs, closed when it has ended; on a thread of its own.

The thread (``air_nb-track-<run>``) tries again and again while the store is not there; once the run is over, only for
a moment. What it could not send is in the run directory, for ``finish_run``.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from pathlib import Path

from air_nb.protocol.tracking import TrackedState
from air_nb.runs.directory import locate
from air_nb.tracking.sender import BusyError, Sender
from air_nb.tracking.store import StoreError

__all__ = ["FollowedRun", "finish_run"]

_EVERY_S = 0.5
_HURRY_S = 0.02
_MAX_DELAY_S = 15.0
_SLOW_S = 3.5  # of a call: the user is told within 5 s of the launch
_GIVE_UP_S = 2.0
_BUSY_S = 20.0  # a call of 10 s that is on, and what is tried after the end of a run
_POLL_S = 0.1
_RECORD_S = 2.0  # for the launcher to close the record when the kernel is gone; it takes 1 s at most


class FollowedRun:
    """See the module. ``end``, ``lose_kernel`` and ``look`` are called on other threads.

    Args:
        path: Run directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sender: Sender | None = None
        self._wake = threading.Event()
        self._over_at: float | None = None
        self._gone_at: float | None = None
        self._thread = threading.Thread(target=self._main, name=f"air_nb-track-{path.name}", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether there is still something to do."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """The run's record is final."""
        self._over_at = self._over_at or time.monotonic()
        self._wake.set()

    def lose_kernel(self) -> None:
        """The kernel is gone: the launcher is ending the run."""
        self._gone_at = self._gone_at or time.monotonic()
        self._wake.set()

    def look(self) -> None:
        """Say so if the store keeps us waiting. A database on this machine may: it is making its tables."""
        sender = self._sender
        if sender is None or sender.store.uri.startswith("sqlite"):
            return
        since = sender.store.waiting_since
        if since is not None and time.monotonic() - since > _SLOW_S and sender.tracked.now.problem is None:
            sender.tracked.update(problem=f"{sender.store.uri}: no answer for {_SLOW_S:g} s.")

    def _main(self) -> None:
        try:
            self._sender = Sender(self._path)
        except BusyError:
            return
        except (OSError, ValueError) as error:
            sys.stderr.write(f"air_nb: run {self._path.name} can't be tracked: {error}\n")
            return
        try:
            if self._sender.tracked.now.state is not TrackedState.ENDED:
                self._follow(self._sender)
        except Exception as error:  # noqa: BLE001 - the border of the run's thread
            traceback.print_exc()
            self._sender.tracked.update(problem=f"tracking failed: {type(error).__name__}: {error}.")
        finally:
            self._sender.close()

    def _follow(self, sender: Sender) -> None:
        delay = _EVERY_S
        while True:
            is_over = self._is_over(sender)
            was_bad = sender.tracked.now.problem is not None
            try:
                self._advance(sender, is_over=is_over)
            except StoreError as error:
                sys.stderr.write(f"air_nb: run {self._path.name}: {error}\n")
                sender.tracked.update(problem=f"{error}.")
                if is_over and (was_bad or self._is_late()):
                    return
                delay = min(delay * 2, _MAX_DELAY_S)
            else:
                if is_over:
                    return
                delay = _EVERY_S
            self._wake.wait(_HURRY_S if self._gone_at is not None and not is_over else delay)
            self._wake.clear()

    def _advance(self, sender: Sender, *, is_over: bool) -> None:
        sender.open()
        if not is_over:
            sender.watch_system()
            sender.describe()
            sender.forward()
            sender.send_logs(final=False)
            sender.tracked.update(problem=None)
            return
        if self._gone_at is not None:
            sender.terminate()  # first: what is left may be more than the time
        sender.finish()

    def _is_over(self, sender: Sender) -> bool:
        if self._over_at is None and self._gone_at is not None:
            waited_s = time.monotonic() - self._gone_at
            if waited_s > _RECORD_S or sender.read_record().state.is_final:
                self._over_at = time.monotonic()
        return self._over_at is not None

    def _is_late(self) -> bool:
        return self._over_at is not None and time.monotonic() - self._over_at > _GIVE_UP_S


def finish_run(path: Path) -> str:
    """Send what a run of the past has not sent yet, and end it. Who is at it already may first give up (bounded).

    Args:
        path: Run directory.

    Returns:
        What came of it, one sentence.
    """
    try:
        if locate(path).read_record().is_live:
            return "still running: it is sent while it runs, and when it ends."
        sender = _take(path)
    except BusyError:
        return "another process is sending it."
    except FileNotFoundError:
        return "not tracked: it has no tracking.json."
    except (OSError, ValueError) as error:
        return f"it can't be read: {error}."
    try:
        return _finish(sender)
    finally:
        sender.close()


def _take(path: Path) -> Sender:
    end = time.monotonic() + _BUSY_S
    while True:
        try:
            return Sender(path)
        except BusyError:
            if time.monotonic() > end:
                raise
            time.sleep(_POLL_S)


def _finish(sender: Sender) -> str:
    place = f"{sender.store.uri}, run"
    if sender.tracked.now.state is TrackedState.ENDED:
        return f"complete already: {place} {sender.tracked.now.mlflow_run_id}."
    try:
        sender.open()
        sender.finish()
    except StoreError as error:
        sender.tracked.update(problem=f"{error}.")
        return f"not sent: {error}."
    return f"sent: {place} {sender.tracked.now.mlflow_run_id}."
