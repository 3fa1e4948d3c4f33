"""What a run's directory knows of checkpoints: which were committed, and which ranks save one when they are stopped.

A JSON line per checkpoint, written by rank 0. A rank that will save at its next batch boundary leaves a mark as long as
that holds: it then has more time between SIGINT and SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
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
        stall_s: For how long it stopped the training; None in notes of earlier versions, as the next two.
        seconds: How long it took until it was committed.
        size_bytes: Its size.
    """

    path: str
    step: int
    at: float
    stall_s: float | None = None
    seconds: float | None = None
    size_bytes: int | None = None


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
    return list(_decode(_lines(directory)))


def newest_checkpoint(directory: Path) -> CommittedCheckpoint | None:
    """What a run has committed last; read from the end, for the panel asks every second."""
    return next(_decode(reversed(_lines(directory, _TAIL_BYTES))), None)


def _lines(directory: Path, last_bytes: int | None = None) -> list[bytes]:
    try:
        with (directory / _FILE).open("rb") as file:
            if last_bytes is not None:
                file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def _decode(lines: Iterable[bytes]) -> Iterator[CommittedCheckpoint]:
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            yield CommittedCheckpoint(**json.loads(line))


def saves_when_stopped(directory: Path) -> bool:
    """Whether a rank has left its mark: asked to stop, it first saves a checkpoint."""
    return any(directory.glob(_SAVING))


def stop_grace_s(env: Mapping[str, str]) -> float:
    """Seconds that such a rank has: ``AIR_NB_STOP_GRACE_S``, else 30; never less than none."""
    try:
        return max(0.0, float(env.get(_GRACE_VARIABLE, _GRACE_S)))
    except ValueError:
        return _GRACE_S
