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
    "record_checkpoint",
    "saves_when_stopped",
    "stop_grace_s",
]

RUN_DIR_VARIABLE = "AIR_NB_RUN_DIR"
"""Set for the ranks of every run."""

RESUME_VARIABLE = "AIR_NB_RESUME"
"""``--resume`` for the ranks: auto, must, never, or the path of a checkpoint."""

_FILE = "checkpoints.jsonl"
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
    """

    path: str
    step: int
    at: float


def record_checkpoint(path: str, step: int) -> None:
    """Note a committed checkpoint in the run that this process is a rank of; nothing outside one."""
    directory = os.environ.get(RUN_DIR_VARIABLE)
    if directory is None:
        return
    line = json.dumps(asdict(CommittedCheckpoint(path, step, time.time()))) + "\n"
    descriptor = os.open(Path(directory) / _FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def committed_checkpoints(directory: Path) -> list[CommittedCheckpoint]:
    """What a run has committed, oldest first; a torn last line is left out."""
    found = []
    try:
        lines = (directory / _FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
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
