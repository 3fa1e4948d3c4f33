"""Ctrl-C and Jupyter's Interrupt while a run is waited for: counted, never raised in the middle of our protocol."""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Callable
from typing import Any, Self

__all__ = ["InterruptCounter"]


class InterruptCounter:
    """Context: SIGINT counts and wakes the waiter; the previous handler is back afterwards.

    Off the main thread it does nothing, since signals are delivered to the main thread only.

    Args:
        wake: Called from the signal handler.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.count = 0
        self._wake = wake
        self._previous: Any = None
        self._installed = False

    def _handle(self, _number: int, _frame: types.FrameType | None) -> None:
        self.count += 1
        self._wake()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.SIG_DFL if self._previous is None else self._previous)
