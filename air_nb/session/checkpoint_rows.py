"""Checkpoints that runs have committed -> the rows of the panel's table; remembers what deep checks have found."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from air_nb.errors import CheckpointError
from air_nb.runs.checkpoints import CommittedCheckpoint, committed_checkpoints
from air_nb.session.relaunch import why_not
from air_nb.session.roots import Listing, Roots, root_of
from air_nb.sidebar.rows import CheckpointRow, RootRows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from air_nb.checkpoint.catalog import CheckpointInfo
    from air_nb.runs.directory import RunDirectory, RunRecord

__all__ = ["CheckpointTable"]

_SHOWN = 200


@dataclass(frozen=True, slots=True)
class _Found:
    """What a deep check has found, and of which commit: a path may be written again."""

    created_at: float | None
    problems: tuple[str, ...]


class CheckpointTable:
    """See the module. Thread-safe."""

    def __init__(self) -> None:
        self._roots = Roots()
        self._lock = threading.Lock()
        self._verifying: set[str] = set()
        self._found: dict[str, _Found] = {}
        self._committed: dict[str, tuple[tuple[int, int], list[CommittedCheckpoint]]] = {}

    def rows(self, runs: Sequence[tuple[RunDirectory, RunRecord]]) -> list[RootRows]:
        """The roots that these runs have written to, the one with the newest checkpoint first."""
        writers: dict[str, RunRecord] = {}
        resumable: dict[str, bool] = {}
        recorded: dict[str, set[str]] = {}
        for directory, record in reversed(runs):  # a path that two runs have written is the newer one's
            resumable[record.run_id] = not why_not(directory, record)
            for checkpoint in self._committed_by(directory):
                writers[checkpoint.path] = record
                recorded.setdefault(root_of(checkpoint.path), set()).add(checkpoint.path)
        listings = self._roots.listings({root: frozenset(paths) for root, paths in recorded.items()})
        with self._lock:
            found = [
                self._root_rows(root, listing, writers, resumable)
                for root, listing in listings.items()
                if listing.checkpoints or listing.problem
            ]
        return sorted(found, key=_newest, reverse=True)

    def verify(self, path: str) -> str:
        """Read every byte of a checkpoint and compare; see ``Actions.verify``.

        Raises:
            CheckpointError: It is being checked already, or it is no directory.
            OSError: The storage can't be read.
        """
        from air_nb.checkpoint.catalog import describe, verify
        from air_nb.checkpoint.store import open_store

        name = path.rstrip("/").rpartition("/")[2]
        with self._checking(path):
            info = describe(open_store(path), name)
            verdict = verify(path, deep=True)
            with self._lock:
                self._found[path] = _Found(info.created_at if info is not None else None, verdict.problems)
        if verdict.ok:
            return f"{name}: every byte is as it was committed"
        return f"{name} is damaged: {'; '.join(verdict.problems)}"

    @contextmanager
    def _checking(self, path: str) -> Iterator[None]:
        with self._lock:
            if path in self._verifying:
                raise CheckpointError(f"{path} is being checked already")
            self._verifying.add(path)
        try:
            yield
        finally:
            with self._lock:
                self._verifying.discard(path)

    def _committed_by(self, directory: RunDirectory) -> list[CommittedCheckpoint]:
        """As ``committed_checkpoints``, which is read again only if it has grown."""
        try:
            status = (directory.path / "checkpoints.jsonl").stat()
        except OSError:
            return []
        signature = (status.st_mtime_ns, status.st_size)
        with self._lock:
            known = self._committed.get(directory.run_id)
        if known is not None and known[0] == signature:
            return known[1]
        found = committed_checkpoints(directory.path)
        with self._lock:
            self._committed[directory.run_id] = (signature, found)
        return found

    # -- with the lock held ------------------------------------------------------------------------------------------

    def _root_rows(
        self, root: str, listing: Listing, writers: dict[str, RunRecord], resumable: dict[str, bool]
    ) -> RootRows:
        shown = listing.checkpoints[:_SHOWN]
        rows = tuple(self._row(info, writers.get(info.path), resumable) for info in shown)
        return RootRows(root, listing.problem, rows, more=len(listing.checkpoints) - len(shown))

    def _row(self, info: CheckpointInfo, writer: RunRecord | None, resumable: dict[str, bool]) -> CheckpointRow:
        run_id = writer.run_id if writer is not None else info.run_id
        found = self._found.get(info.path)
        if found is not None and found.created_at != info.created_at:
            found = None
        is_damaged = found is not None and bool(found.problems)
        return CheckpointRow(
            path=info.path,
            step=info.step,
            created_at=info.created_at,
            size_bytes=info.size_bytes,
            state=info.state.value,
            verified=None if found is None else not found.problems,
            verifying=info.path in self._verifying,
            problem=info.reason or ("; ".join(found.problems) if found is not None else ""),
            run_id=run_id,
            run_name=writer.name if writer is not None else info.run_name,
            can_resume=info.is_valid and not is_damaged and resumable.get(run_id or "", False),
        )


def _newest(root: RootRows) -> float:
    return max((row.created_at or 0.0 for row in root.checkpoints), default=0.0)
