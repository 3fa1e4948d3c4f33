"""All runs of this user, for whoever asks every second: a record is read again only when its file has changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from air_nb.runs.directory import RECORD_FILE, RunDirectory, RunRecord, run_roots
from air_nb.runs.paths import home_path, is_network_path, node_local

__all__ = ["RunIndex", "local_roots"]

_Signature = tuple[int, int, int]
_Run = tuple[RunDirectory, RunRecord]


class RunIndex:
    """See the module. Thread-safe.

    Args:
        roots: Directories of run directories; None for all there are. See ``local_roots``.
    """

    def __init__(self, roots: Sequence[Path] | None = None) -> None:
        self._roots = roots
        self._lock = threading.Lock()
        self._known: dict[str, tuple[_Signature, _Run | None]] = {}

    def runs(self) -> list[tuple[RunDirectory, RunRecord]]:
        """Every readable run, newest first; one that is just moving home is listed once, where it was.

        A record is the same object as before if it has not changed.
        """
        with self._lock:
            found: dict[str, _Run] = {}
            seen = {}
            for path in _candidates(run_roots() if self._roots is None else self._roots):
                signature = _signature(path)
                if signature is None:
                    continue
                known = self._known.get(path)
                seen[path] = known if known is not None and known[0] == signature else (signature, _read(path))
                run = seen[path][1]
                if run is not None:
                    found.setdefault(run[1].run_id, run)
            self._known = seen
        return sorted(found.values(), key=lambda run: run[1].created_at, reverse=True)

    def live(self) -> list[RunRecord]:
        """Records of the runs that are live now, newest first."""
        return [record for _, record in self.runs() if record.is_live]

    def find(self, run_id: str) -> tuple[RunDirectory, RunRecord]:
        """The run with this id.

        Raises:
            LookupError: There is none (any more).
        """
        for directory, record in self.runs():
            if record.run_id == run_id:
                return directory, record
        msg = f"there is no run {run_id!r} any more"
        raise LookupError(msg)


def local_roots() -> list[Path]:
    """Where live runs are: never on a network file system, which a poll must not wait for."""
    homes = [] if is_network_path(home_path()) else [home_path()]
    return [each / "runs" for each in dict.fromkeys((*homes, node_local()))]


def _candidates(roots: Iterable[Path]) -> list[str]:
    found = []
    for root in roots:
        try:
            with os.scandir(root) as entries:
                found += [entry.path for entry in entries]
        except OSError:  # no run so far
            continue
    return found


def _signature(path: str) -> _Signature | None:
    """Changes with every record: each is a new file."""
    try:
        status = os.stat(f"{path}/{RECORD_FILE}")  # noqa: PTH116 - for hundreds of runs a second, a Path costs most
    except OSError:  # another process is making or deleting it, or it is no run
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _read(path: str) -> _Run | None:
    directory = RunDirectory(Path(path))
    try:
        return directory, directory.read_record()
    except (OSError, ValueError):
        return None
