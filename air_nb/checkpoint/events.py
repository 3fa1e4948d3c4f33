"""What a checkpoint manager tells: events for programs, sentences for whoever reads the output."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["CheckpointEvent", "EventKind", "say"]


class EventKind(StrEnum):
    """What happened.

    SAVED, SAVE_FAILED: a save has ended. RESTORED: training goes on from a checkpoint. REJECTED: one that was to be
    restored is damaged, or was never completed, and the one before it is tried. STOPPING: a signal ends the loop after
    a save. RETENTION_FAILED: old checkpoints could not be deleted; nothing else is wrong.
    """

    SAVED = "saved"
    SAVE_FAILED = "save failed"
    RESTORED = "restored"
    REJECTED = "rejected"
    STOPPING = "stopping"
    RETENTION_FAILED = "retention failed"


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """One thing that happened to a checkpoint.

    Attributes:
        kind: What.
        step: Number of steps completed; None where there is none.
        path: Directory or URL of the checkpoint; None before there is one.
        message: A sentence that says it.
        at: UTC seconds since the epoch.
        seconds: How long it took; None where that means nothing.
        stall_s: For how long it stopped training; likewise.
        size_bytes: Size of the checkpoint; likewise.
    """

    kind: EventKind
    step: int | None
    path: str | None
    message: str
    at: float = field(default_factory=time.time)
    seconds: float | None = None
    stall_s: float | None = None
    size_bytes: int | None = None


def say(text: str) -> None:
    """Tell whoever reads the output of this rank: going on from a checkpoint must never pass unnoticed."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more: no reason for training to end
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
