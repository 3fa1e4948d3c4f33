"""``mlflow.json`` of one run: read once, then written by one tracking process, from any of its threads."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from air_nb.protocol.tracking import REQUEST_FILE, TRACKED_FILE, TrackedRun, TrackedState, TrackingRequest
from air_nb.runs.directory import locate
from air_nb.runs.unsent import read_tracked

__all__ = ["TrackedFile", "read_request"]

_MAX_REFUSED = 20


def read_request(path: Path) -> TrackingRequest:
    """What the kernel asks for.

    Raises:
        OSError, ValueError: The run is not tracked, or by another version.
    """
    return TrackingRequest.decode((locate(path).path / REQUEST_FILE).read_text())


class TrackedFile:
    """See the module.

    Args:
        path: Run directory, where it was at first.
        request: For a run that has no file yet.
    """

    def __init__(self, path: Path, request: TrackingRequest) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._written = read_tracked(path)
        self._now = self._written or TrackedRun(TrackedState.PENDING, request.tracking_uri)

    @property
    def now(self) -> TrackedRun:
        """As it is now, whether or not that could be written."""
        return self._now

    @property
    def exists(self) -> bool:
        """Whether there is a file."""
        return self._written is not None

    def update(self, **changes: Any) -> None:
        """Change fields. A full disk keeps them from the file until there is room; it must not end the sending."""
        with self._lock:
            self._now = replace(self._now, **changes)
            self._write()

    def refuse(self, sentence: str) -> None:
        """Note what MLflow will never take."""
        with self._lock:
            refused = self._now.refused
            if sentence in refused or len(refused) > _MAX_REFUSED:
                return
            if len(refused) == _MAX_REFUSED:
                sentence = "More was refused; the log of the tracking process has it all."
            self._now = replace(self._now, refused=[*refused, sentence])
            self._write()

    def _write(self) -> None:
        if self._now == self._written:
            return
        try:
            directory = locate(self._path)
            directory.write_private(TRACKED_FILE, self._now.encode())
            if not directory.path.exists():  # moved home at this very moment
                locate(self._path).write_private(TRACKED_FILE, self._now.encode())
        except OSError as error:
            sys.stderr.write(f"air_nb: {TRACKED_FILE} of run {self._path.name} can't be written: {error}\n")
        else:
            self._written = self._now
