"""Old run directories go: at most 50 runs, 30 days, 5 GiB, never a live one; records of dead ones are closed.

What a tracking server has not been able to take yet is kept for the 30 days, however many and large they are.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from air_nb.protocol.messages import RunState
from air_nb.runs.directory import RECORD_FILE, all_runs
from air_nb.runs.paths import home
from air_nb.runs.text import DIED
from air_nb.runs.unsent import is_unsent

__all__ = ["close_dead_runs", "prune"]

_MAX_RUNS = 50
_MAX_AGE_S = 30 * 24 * 3600.0
_MAX_BYTES = 5 * 2**30
_UNRECORDED_MAX_AGE_S = 24 * 3600.0


def close_dead_runs() -> None:
    """Record as KILLED the runs whose launcher died before it could say how they ended.

    What a dead kernel left in the node-local directory moves home.
    """
    for directory, record in all_runs():
        with contextlib.suppress(OSError, ValueError):  # another kernel closes, moves or deletes it too
            if not record.state.is_final and not record.is_live:
                directory.update_record(state=RunState.KILLED, ended_at=time.time(), reason=DIED)
            if not record.is_live and (record.kernel is None or not record.kernel.is_alive()):
                directory.settle()


def prune(*, max_runs: int = _MAX_RUNS, max_age_s: float = _MAX_AGE_S, max_bytes: int = _MAX_BYTES) -> list[str]:
    """Delete the oldest run directories beyond the limits.

    Returns:
        Ids of the deleted runs.
    """
    _delete_unrecorded(time.time() - _UNRECORDED_MAX_AGE_S)
    deleted = []
    kept = total = 0
    oldest = time.time() - max_age_s
    for directory, record in all_runs():
        if record.is_live:
            continue
        kept += 1
        total += _size_bytes(directory.path)
        is_surplus = (kept > max_runs or total > max_bytes) and not is_unsent(directory)
        if is_surplus or record.created_at < oldest:
            shutil.rmtree(directory.path, ignore_errors=True)  # another kernel may be pruning too
            deleted.append(record.run_id)
    return deleted


def _delete_unrecorded(oldest: float) -> None:
    """Delete directories whose kernel died between making them and recording the run."""
    for path in (home() / "runs").glob("*"):
        with contextlib.suppress(OSError):
            if not (path / RECORD_FILE).exists() and path.stat().st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)


def _size_bytes(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.lstat().st_size
        except FileNotFoundError:
            continue
    return total
