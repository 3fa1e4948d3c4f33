"""What a run's directory knows of checkpoints: which were committed, and which ranks save one when they are stopped.

A JSON line per checkpoint, written by rank 0. A rank that will save at its next batch boundary leaves a mark as long as
that holds: it then has more time between SIGINT and SIGTERM.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = [
    "RESUME_VARIABLE",
    "RUN_DIR_VARIABLE",
    "CommittedCheckpoint",
    "committed_checkpoints",
    "newest_checkpoint",
    "record_checkpoint",
    "saves_when_stopped",
    "stop_grace_s",
]

RUN_DIR_VARIABLE = "AIR_NB_RUN_DIR"
"""Set for the ranks of every run."""

RESUME_VARIABLE = "AIR_NB_RESUME"
"""``--resume`` for the ranks: auto, must, never, or the path of a checkpoint."""

_FILE = "checkpoints.jsonl"
_TAIL_BYTES = 16384
_SAVING = "saving_rank_*"
_GRACE_VARIABLE = "AIR_NB_STOP_GRACE_S"
_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """One checkpoint of a run.

    Attributes:
        path: Directory or URL.
        step: Number of steps completed.
        at: When it was committed, UTC seconds since the epoch.
        stall_s: For how long it stopped the training.
        seconds: How long it took until it was committed.
        size_bytes: Its size.
    """

    path: str
    step: int
    at: float
    stall_s: float
    seconds: float
    size_bytes: int


def record_checkpoint(path: str, step: int, *, stall_s: float, seconds: float, size_bytes: int) -> None:
    """Note a committed checkpoint in the run that this process is a rank of; nothing outside one.

    Args:
        path: See `CommittedCheckpoint`, as for the others.
        step: Number of steps.
        stall_s: Time for which training stood still.
        seconds: Time until the commit.
        size_bytes: Bytes.
    """
    directory = os.environ.get(RUN_DIR_VARIABLE)
    if directory is None:
        return
    committed = CommittedCheckpoint(path, step, time.time(), stall_s, seconds, size_bytes)
    line = json.dumps(asdict(committed)) + "\n"
    descriptor = os.open(Path(directory) / _FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def committed_checkpoints(directory: Path) -> list[CommittedCheckpoint]:
    """What a run has committed, oldest first; a torn last line is left out."""
    return _read(directory, None)


def newest_checkpoint(directory: Path) -> CommittedCheckpoint | None:
    """What a run has committed last; for less than reading of all."""
    newest = _read(directory, _TAIL_BYTES)
    return newest[-1] if newest else None


def _read(directory: Path, last_bytes: int | None) -> list[CommittedCheckpoint]:
    try:
        with (directory / _FILE).open("rb") as file:
            if last_bytes is not None:
                file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(CommittedCheckpoint(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def saves_when_stopped(directory: Path) -> bool:
    """Whether a rank has left its mark: asked to stop, it first saves a checkpoint."""
    return any(directory.glob(_SAVING))


def stop_grace_s(env: Mapping[str, str]) -> float:
    """Seconds that such a rank has: ``AIR_NB_STOP_GRACE_S``, else 30; never less than none."""
    try:
        return max(0.0, float(env.get(_GRACE_VARIABLE, _GRACE_S)))
    except ValueError:
        return _GRACE_S
