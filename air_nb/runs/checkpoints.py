"""Which checkpoints a run has committed: a JSON line each in the run directory, written by rank 0."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["RUN_DIR_VARIABLE", "CommittedCheckpoint", "committed_checkpoints", "record_checkpoint"]

RUN_DIR_VARIABLE = "AIR_NB_RUN_DIR"
"""Set for the ranks of every run."""

_FILE = "checkpoints.jsonl"


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
