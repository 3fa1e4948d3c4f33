"""Runs of this user -> the rows of the panel's table. Cheap enough to be asked for every second."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from air_nb.protocol.messages import RunState
from air_nb.protocol.tracking import TRACKED_FILE
from air_nb.runs.liveness import ProcessId
from air_nb.runs.text import last_line, reason_line
from air_nb.runs.unsent import read_tracked
from air_nb.session.relaunch import why_not
from air_nb.session.run_figures import run_figures
from air_nb.sidebar.rows import Link, RunRow
from air_nb.tracking.jupyter_server import find_jupyter_server
from air_nb.tracking.links import run_page

if TYPE_CHECKING:
    from collections.abc import Iterable

    from air_nb.runs.directory import RunDirectory, RunRecord

__all__ = ["RunRows"]

_ENDED_SHOWN = 20


class RunRows:
    """See the module. One of a run that has ended is made once. Thread-safe: the worst is that one is made twice."""

    def __init__(self) -> None:
        self._ended: dict[str, tuple[RunRecord, int, RunRow]] = {}

    def rows(self, runs: Iterable[tuple[RunDirectory, RunRecord]]) -> list[RunRow]:
        """All live runs and the last 20 that ended.

        Args:
            runs: Newest first, as ``RunIndex`` has them.
        """
        rows = []
        own = ProcessId.own()
        ended: dict[str, tuple[RunRecord, int, RunRow]] = {}
        for directory, record in runs:
            if record.is_live:
                rows.append(_row(directory, record, own, is_live=True))
            elif len(ended) < _ENDED_SHOWN:
                ended[record.run_id] = self._ended_row(directory, record, own)
                rows.append(ended[record.run_id][2])
        self._ended = ended
        return rows

    def _ended_row(self, directory: RunDirectory, record: RunRecord, own: ProcessId) -> tuple[RunRecord, int, RunRow]:
        """The row with what it was made from; MLflow may learn of the run long after its end."""
        tracked_ns = _changed_ns(directory)
        known = self._ended.get(record.run_id)
        if known is not None and known[0] is record and known[1] == tracked_ns:
            return known
        return record, tracked_ns, _row(directory, record, own, is_live=False)


def _changed_ns(directory: RunDirectory) -> int:
    try:
        return (directory.path / TRACKED_FILE).stat().st_mtime_ns
    except OSError:
        return 0


def _row(directory: RunDirectory, record: RunRecord, own: ProcessId, *, is_live: bool) -> RunRow:
    return RunRow(
        run_id=record.run_id,
        name=record.name,
        state=(record.state if is_live or record.state.is_final else RunState.KILLED).value,
        is_live=is_live,
        is_mine=record.kernel == own,
        notebook=Path(record.notebook).name if record.notebook else None,
        nproc=record.nproc,
        device=record.device,
        created_at=record.created_at,
        started_at=record.started_at,
        ended_at=record.ended_at,
        reason=reason_line(record),
        line=last_line(directory, 0),
        figures=run_figures(directory, record.nproc),
        link=_link(directory, record),
        can_resume=not why_not(directory, record),
    )


def _link(directory: RunDirectory, record: RunRecord) -> Link | None:
    tracked = read_tracked(directory.path)
    found = run_page(tracked, record.run_id, _jupyter_server()) if tracked is not None else None
    return Link(found.href, found.label, found.text) if found is not None else None


# Once: it takes milliseconds, and a kernel's server is always the same.
_jupyter_server = functools.cache(find_jupyter_server)
