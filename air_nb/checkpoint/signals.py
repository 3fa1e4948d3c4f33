"""SIGTERM and interrupt while a training loop runs: the first one is noted, for the next boundary between two steps.

Belongs to the main thread, where Python runs signal handlers; a loop on another thread gets none.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

from air_nb.runs.checkpoints import RUN_DIR_VARIABLE

__all__ = ["StopReason", "StopRequest", "listening", "marked_as_saving", "stop_grace_s"]

GRACE_VARIABLE = "AIR_NB_STOP_GRACE_S"
_GRACE_S = 30.0  # what batch systems give between SIGTERM and SIGKILL


class StopReason(IntEnum):
    """Why to stop, the graver one higher: ranks take the highest that any of them knows."""

    NONE = 0
    INTERRUPT = 1
    TERMINATE = 2


class StopRequest:
    """What the signals of this process have asked for."""

    def __init__(self) -> None:
        self.reason = StopReason.NONE
        self.is_taken = False
        self._at_s: float | None = None

    def note(self, reason: StopReason) -> None:
        """A signal has arrived."""
        self.reason = max(self.reason, reason)
        if self._at_s is None:
            self._at_s = time.monotonic()

    def taken(self, agreed: StopReason = StopReason.NONE) -> BaseException:
        """What ends the loop once the checkpoint is saved, as the signal would have done without us.

        Args:
            agreed: What the ranks agreed on; it may be another one's signal.
        """
        self.is_taken = True
        if max(agreed, self.reason) is StopReason.TERMINATE:
            return SystemExit(128 + signal.SIGTERM)
        return KeyboardInterrupt()

    def remaining_s(self, grace_s: float) -> float:
        """How much of the grace is left, on a rank that was not signalled all of it."""
        return grace_s if self._at_s is None else max(0.0, grace_s - (time.monotonic() - self._at_s))


def stop_grace_s() -> float:
    """How long a save may take once we are told to stop: AIR_NB_STOP_GRACE_S, else 30 s.

    Raises:
        ValueError: The variable is no number.
    """
    text = os.environ.get(GRACE_VARIABLE, "")
    try:
        return float(text) if text else _GRACE_S
    except ValueError:
        msg = f"{GRACE_VARIABLE}={text!r}: give seconds, as in {GRACE_VARIABLE}=30"
        raise ValueError(msg) from None


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Note the first SIGINT and SIGTERM meanwhile; the second of either does what it would have done without us.

    So does a SIGTERM that nobody has taken when the loop ends for another reason: who sent it means the process.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in _REASONS}

    def note(number: int, frame: FrameType | None) -> None:
        if request.reason is StopReason.NONE or number == signal.SIGTERM != _signal_of(request.reason):
            request.note(_REASONS[signal.Signals(number)])
            return
        restore()
        _deliver(before[signal.Signals(number)], number, frame)

    def restore() -> None:
        for number, handler in before.items():
            # None: set by C code, which Python can't put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
        if request.reason is StopReason.TERMINATE and not request.is_taken:
            os.kill(os.getpid(), signal.SIGTERM)


_REASONS = {signal.SIGINT: StopReason.INTERRUPT, signal.SIGTERM: StopReason.TERMINATE}


def _signal_of(reason: StopReason) -> int:
    return next(number for number, meant in _REASONS.items() if meant is reason)


def _deliver(handler: Any, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    else:
        os.kill(os.getpid(), number)


@contextmanager
def marked_as_saving(rank: int) -> Iterator[None]:
    """Let the launcher of our runs know that an interrupt leads to a save, so that it waits for it.

    ``saving_rank_<r>`` is in the run directory meanwhile; outside such a run nothing happens.
    """
    directory = os.environ.get(RUN_DIR_VARIABLE)
    if directory is None:
        yield
        return
    mark = Path(directory) / f"saving_rank_{rank}"
    mark.touch(mode=0o600)
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)
