"""``%air runs --upload`` and ``--repair``: what MLflow has not been told yet, from the run directories alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from air_nb.protocol.tracking import TrackedState
from air_nb.runs.directory import RunDirectory, RunRecord, all_runs, find_run
from air_nb.runs.retention import close_dead_runs
from air_nb.runs.unsent import is_tracked, is_unsent, read_tracked
from air_nb.session.mlflow_state import has_mlflow

if TYPE_CHECKING:
    from air_nb.session.session import Session

__all__ = ["close_left_open", "repair_text", "upload_text"]

_FINISH_S = 60.0
_NO_MLFLOW = "MLflow is not installed here: pip install 'air_nb[mlflow]'"


def upload_text(session: Session, run: str) -> str:
    """Send what a run has not been able to send.

    Raises:
        LookupError: There is no such run, it has not ended, or it was never to be tracked.
    """
    directory, record = find_run(run)
    if record.is_live:
        msg = f"run {record.name} has not ended: it sends by itself what it can"
        raise LookupError(msg)
    if not is_tracked(directory):
        msg = f"run {record.name} was not tracked: there is nothing to send"
        raise LookupError(msg)
    if not is_unsent(directory):
        return f"run {record.name}: MLflow has everything"
    return _finish(session, [(directory, record)])


def repair_text(session: Session) -> str:
    """End in MLflow every run that is dead, and send what is left of it."""
    close_dead_runs()
    left = [(directory, record) for directory, record in all_runs() if not record.is_live and is_unsent(directory)]
    return _finish(session, left) if left else "nothing to repair: MLflow knows how every run ended"


def close_left_open(session: Session) -> None:
    """Of the past, in the background: no run may stay RUNNING in MLflow for ever."""
    left = [directory.path for directory, record in all_runs() if not record.is_live and _is_left(directory, record)]
    if left:
        session.tracking.finish(left, dict(os.environ), _FINISH_S)


def _is_left(directory: RunDirectory, record: RunRecord) -> bool:
    """Whether MLflow still has it as RUNNING, or its kernel ended before anybody could ask MLflow.

    Not what a server has not answered to: that is sent when the user says so.
    """
    tracked = read_tracked(directory.path)
    if tracked is None or (tracked.state == TrackedState.PENDING and tracked.problem is None):
        return is_tracked(directory) and (record.kernel is None or not record.kernel.is_alive())
    return tracked.state == TrackedState.OPEN


def _finish(session: Session, runs: list[tuple[RunDirectory, RunRecord]]) -> str:
    if not has_mlflow():
        return _NO_MLFLOW
    outcomes = session.tracking.finish([directory.path for directory, _ in runs], dict(os.environ), _FINISH_S)
    missing = f"no answer within {_FINISH_S:g} s; it goes on: ask again"
    return "\n".join(f"run {record.name}: {outcomes.get(record.run_id, missing)}" for _, record in runs)
