"""Which runs MLflow has not been told everything of, from their directories alone."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from air_nb.protocol.tracking import REQUEST_FILE, TRACKED_FILE, TrackedRun, TrackedState
from air_nb.runs.directory import RunDirectory, locate

__all__ = ["is_tracked", "is_unsent", "read_tracked"]


def read_tracked(path: Path) -> TrackedRun | None:
    """The MLflow run of a run as far as it has got; None if it is not tracked, or nobody has looked after it yet.

    Args:
        path: Run directory, where it was at first.
    """
    with suppress(OSError, ValueError):
        return TrackedRun.decode((locate(path).path / TRACKED_FILE).read_text())
    return None


def is_tracked(directory: RunDirectory) -> bool:
    """Whether the run was launched to be tracked."""
    return (directory.path / REQUEST_FILE).exists()


def is_unsent(directory: RunDirectory) -> bool:
    """Whether there is something that MLflow does not know yet."""
    tracked = read_tracked(directory.path)
    return is_tracked(directory) and (tracked is None or tracked.state != TrackedState.ENDED)
