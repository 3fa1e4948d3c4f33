"""What a rank logs, on its way to MLflow: one file per rank, one JSON object per line, appended only.

Written by the rank (``rank_hook``, ``air_nb.runtime.log_metrics``) and by the processes that it forks, read by the
tracking process. A rank never waits for a server, and what can't be sent today is still there tomorrow. Imports neither
MLflow nor anything heavy.

A line holds any of these::

    {"metrics": [[key, value, timestamp_ms, step], ...],   value may be NaN, Infinity, -Infinity
     "params": [[key, value], ...],                        values are text
     "tags": [[key, value], ...],                          values are text
     "run_name": name,                                     the run is to be called so
     "artifact": [path, artifact_path]}                    a copy that waits to be sent

``path`` of an artifact is relative to the run directory: a file, or a directory, of which the contents are meant;
``artifact_path`` is the directory among the run's artifacts, null for their root. Lines are sent in their order.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from air_nb.protocol.tracking import spool_name

__all__ = ["Spool", "SpoolEntry", "SpoolPart", "rank_spool", "read"]


@dataclass(frozen=True, slots=True)
class SpoolEntry:
    """One line; see the module.

    Attributes:
        metrics: (key, value, timestamp in ms, step).
        params: (key, value).
        tags: (key, value).
        run_name: Name that the run is to have.
        artifact: (path relative to the run directory, artifact path).
    """

    metrics: Sequence[tuple[str, float, int, int]] = ()
    params: Sequence[tuple[str, str]] = ()
    tags: Sequence[tuple[str, str]] = ()
    run_name: str | None = None
    artifact: tuple[str, str | None] | None = None

    def encode(self) -> bytes:
        """One line of JSON."""
        fields = {
            "metrics": self.metrics,
            "params": self.params,
            "tags": self.tags,
            "run_name": self.run_name,
            "artifact": self.artifact,
        }
        return json.dumps({name: value for name, value in fields.items() if value}).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> SpoolEntry:
        """Read what ``encode`` wrote; fields of a later version are ignored.

        Raises:
            ValueError: It is torn, or no line of a spool.
        """
        try:
            return cls._of(json.loads(line))
        except (TypeError, AttributeError, ValueError, RecursionError) as error:
            msg = f"not a line of a spool: {line[:100]!r} ({error})"
            raise ValueError(msg) from error

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> SpoolEntry:
        run_name, artifact = fields.get("run_name"), fields.get("artifact")
        if artifact is not None:
            path, artifact_path = artifact
            artifact = (str(path), artifact_path if artifact_path is None else str(artifact_path))
        return cls(
            metrics=tuple(
                (str(k), float(value), int(at), int(step)) for k, value, at, step in fields.get("metrics", ())
            ),
            params=tuple((str(key), str(value)) for key, value in fields.get("params", ())),
            tags=tuple((str(key), str(value)) for key, value in fields.get("tags", ())),
            run_name=None if run_name is None else str(run_name),
            artifact=artifact,
        )


@dataclass(frozen=True, slots=True)
class SpoolPart:
    """What ``read`` found.

    Attributes:
        entries: In the order of the file.
        offset: Where to go on.
        skipped: Lines that could not be read: torn by a full disk, or written by somebody else.
    """

    entries: list[SpoolEntry]
    offset: int
    skipped: int


def read(path: Path, offset: int, limit: int) -> SpoolPart:
    """Read whole lines.

    Args:
        path: Spool; it need not exist yet.
        offset: Where to start, in bytes: 0 or an ``offset`` of an earlier part.
        limit: Bytes to read, about: at least one line is read if there is one.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
        except FileNotFoundError:
            return SpoolPart([], offset, 0)
        file.seek(offset)
        chunk = file.read(limit)
        if b"\n" not in chunk:
            chunk += file.readline()
    whole = chunk[: chunk.rfind(b"\n") + 1]
    entries, skipped = [], 0
    for line in whole.splitlines():
        try:
            if line:
                entries.append(SpoolEntry.decode(line))
        except ValueError:
            skipped += 1
    return SpoolPart(entries, offset + len(whole), skipped)


class Spool:
    """Writer's end. Threads and forked processes may share it: every entry is one ``write`` to a file opened to append.

    There is no lock on purpose: one that another thread holds at the moment of a fork is never released in the child.

    Args:
        path: File; made when missing, for this user only.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._torn = False
        self.lost = 0
        with contextlib.suppress(OSError):  # the first append says so
            self._fd = self._open()

    def append(self, entry: SpoolEntry) -> None:
        """Append an entry. Never raises for the disk: logging must not end a training. What is lost is counted."""
        line = entry.encode()
        try:
            self._write(line)
        except OSError as error:
            self._report(error)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _write(self, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line  # only the torn entry is lost, not this one with it
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            self._fd = self._open()  # a child that daemonised itself has closed it, or it could not be opened before
            written = os.write(self._fd, line)
        self._torn = written < len(line)
        if self._torn:
            raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes written")

    def _report(self, error: OSError) -> None:
        self.lost += 1
        if self.lost > 1:
            return
        with contextlib.suppress(OSError, ValueError):  # stderr may be a file on the same full disk
            sys.stderr.write(
                f"air_nb: what is logged to MLflow can't be kept in {self._path} ({error.strerror}) and is lost; "
                "the run goes on. Free space there to have the rest.\n"
            )


@functools.cache
def rank_spool(directory: Path, rank: int) -> Spool:
    """The spool of a rank, one per process."""
    path = directory / spool_name(rank)
    with contextlib.suppress(OSError):  # the first append says so
        path.parent.mkdir(mode=0o700, exist_ok=True)
    return Spool(path)
