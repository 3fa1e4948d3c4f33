"""Why ranks are stopped, and how long they have at each step of SIGINT, SIGTERM, SIGKILL (pure)."""

from __future__ import annotations

import signal
from enum import IntEnum

from air_nb.protocol.messages import RunState

__all__ = ["LADDERS", "STATES", "STEPS", "StopKind"]


class StopKind(IntEnum):
    """Why ranks are stopped. A higher one shortens the ladder of a lower one; the first one asked for names the end."""

    FAILURE = 0
    INTERRUPT = 1
    STOP = 2
    TIMEOUT = 3
    KILL = 4
    LOST = 5
    """The forkserver is gone, and the ranks with it."""


STEPS = (signal.SIGINT, signal.SIGTERM)
"""Signals before SIGKILL."""

LADDERS = {
    # A rank in a collective can't answer SIGINT, and the others have lost their peer: the cell must not wait long.
    StopKind.FAILURE: (0.2, 0.3),
    StopKind.INTERRUPT: (3.0, 1.5),
    StopKind.STOP: (3.0, 1.5),
    StopKind.TIMEOUT: (3.0, 1.5),
    StopKind.KILL: (0.0, 0.0),
    StopKind.LOST: (0.0, 0.0),
}
"""Seconds that ranks have after each of ``STEPS`` before the next one; 0 leaves the step out."""

STATES = {
    StopKind.FAILURE: RunState.FAILED,
    StopKind.INTERRUPT: RunState.KILLED,
    StopKind.STOP: RunState.KILLED,
    StopKind.TIMEOUT: RunState.TIMED_OUT,
    StopKind.KILL: RunState.KILLED,
    StopKind.LOST: RunState.FAILED,
}
"""How a run ends that was stopped for this."""
