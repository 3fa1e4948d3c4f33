"""What ranks measure of their data loaders while they train: a JSON line every ten seconds, for MLflow and the panel.

In a folder of its own: the kernel watches the run directory, and must not wake up for each line.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from air_nb.runs.checkpoints import RUN_DIR_VARIABLE

__all__ = ["LoadingFigures", "loading_file", "newest_loading", "read_loading", "record_loading"]

_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LoadingFigures:
    """What all loaders of one rank did since the line before, or since their first batch.

    Attributes:
        at: When that ended, UTC seconds since the epoch.
        seconds: How long it was.
        batches: Batches that the rank has been given, in all.
        examples: Examples that it was given meanwhile.
        wait_s: Time meanwhile for which it waited for batches.
        longest_wait_s: Longest of these waits.
        hits: Files that were in the cache.
        misses: Files that were not, whoever then downloaded them.
        fetched_bytes: Bytes that the rank and its loader workers have downloaded, in all.
    """

    at: float
    seconds: float
    batches: int
    examples: int
    wait_s: float
    longest_wait_s: float
    hits: int = 0
    misses: int = 0
    fetched_bytes: int = 0

    @property
    def wait_percent(self) -> float:
        """Share of the time for which the rank waited; 100 if several of its threads did at once, all the time."""
        return min(100.0, 100 * self.wait_s / self.seconds)

    @property
    def examples_per_s(self) -> float:
        """Examples per second."""
        return self.examples / self.seconds

    @property
    def hit_percent(self) -> float | None:
        """Share of the files that were in the cache; None if none was asked for."""
        asked = self.hits + self.misses
        return 100 * self.hits / asked if asked else None

    @classmethod
    def decode(cls, line: bytes) -> LoadingFigures:
        """Read one line.

        Raises:
            ValueError: It is torn, or of another version.
        """
        try:
            figures = cls(**json.loads(line))
        except TypeError as error:
            raise ValueError(str(error)) from error
        if not all(isinstance(value, int | float) for value in asdict(figures).values()) or figures.seconds <= 0:
            msg = f"no figures of a loader: {line[:100]!r}"
            raise ValueError(msg)
        return figures


def loading_file(rank: int) -> str:
    """Where in the run directory a rank leaves them."""
    return f"loading/rank_{rank}.jsonl"


def record_loading(figures: LoadingFigures) -> None:
    """Append figures of this process's rank to its run; nothing outside one. A full disk loses them, and no more."""
    directory, rank = os.environ.get(RUN_DIR_VARIABLE), os.environ.get("RANK", "0")
    if directory is None:
        return
    path = Path(directory, loading_file(int(rank)))
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # A newline first: a line that a full disk has torn is lost alone, not this one with it.
            os.write(descriptor, b"\n" + json.dumps(asdict(figures)).encode() + b"\n")
        finally:
            os.close(descriptor)


def read_loading(path: Path, offset: int, limit: int) -> tuple[list[LoadingFigures], int]:
    """Read whole lines; those that are torn are left out.

    Args:
        path: A rank's file; it need not exist.
        offset: Where to start, in bytes.
        limit: Bytes to read at most; more than a line.

    Returns:
        The figures, and where to go on.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            chunk = file.read(limit)
    except OSError:
        return [], offset
    whole = chunk[: chunk.rfind(b"\n") + 1]
    found = []
    for line in whole.splitlines():
        with contextlib.suppress(ValueError):
            found.append(LoadingFigures.decode(line))
    return found, offset + len(whole)


def newest_loading(directory: Path, nproc: int) -> dict[int, LoadingFigures]:
    """The newest figures of each rank that has any.

    Args:
        directory: Run directory.
        nproc: Number of ranks.
    """
    newest = {rank: _newest(directory / loading_file(rank)) for rank in range(nproc)}
    return {rank: figures for rank, figures in newest.items() if figures is not None}


def _newest(path: Path) -> LoadingFigures | None:
    """From the end: the panel asks for each live run every second."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            chunk = file.read(_TAIL_BYTES)
    except OSError:
        return None
    for line in reversed(chunk[: chunk.rfind(b"\n") + 1].splitlines()):
        with contextlib.suppress(ValueError):
            return LoadingFigures.decode(line)
    return None
