"""Waiting for something to hold, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["eventually"]


def eventually(holds: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Whether it comes to hold in time."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.05)
    return holds()
