"""MLflow's own objects for a rank's run, made without asking a server.

Imported by ``rank_fluent`` and ``rank_store``, in a rank whose cell has imported MLflow.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from mlflow.entities import Experiment, LifecycleStage, Run, RunData, RunInfo, RunStatus, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME
from mlflow.utils.time import get_current_time_millis

from air_nb.tracking.rank_run import RankRun

__all__ = ["experiment", "lost_run", "run"]


class _Info(RunInfo):
    """Of this rank's run: its ids are those known at the moment of reading."""

    def __init__(self, run: RankRun, read_artifact_uri: Callable[[], str | None]) -> None:
        super().__init__(
            run_id=run.run_id,
            experiment_id=run.experiment_id,
            user_id="",
            status=RunStatus.to_string(RunStatus.RUNNING),
            start_time=get_current_time_millis(),
            end_time=None,
            lifecycle_stage=LifecycleStage.ACTIVE,
            run_name=run.request.run_name,
        )
        self._run = run
        self._read_artifact_uri = read_artifact_uri

    @property
    def run_id(self) -> str:
        return self._run.run_id

    @property
    def experiment_id(self) -> str:
        return self._run.experiment_id

    @property
    def artifact_uri(self) -> str | None:
        return self._read_artifact_uri()

    def __reduce__(self) -> tuple[type[RunInfo], tuple[Any, ...]]:
        """Elsewhere, in the kernel perhaps, it is plain information."""
        fixed = self.user_id, self.status, self.start_time, self.end_time, self.lifecycle_stage, None, self.run_name
        return RunInfo, (self.run_id, self.experiment_id, *fixed)

    @classmethod
    def _properties(cls) -> list[str]:
        return list(RunInfo._properties())  # noqa: SLF001 - MLflow looks at the class alone, not at its bases


def run(rank_run: RankRun, read_artifact_uri: Callable[[], str | None] = lambda: None) -> Run:
    """The launch's run."""
    name = RunTag(MLFLOW_RUN_NAME, rank_run.request.run_name)
    return Run(_Info(rank_run, read_artifact_uri), RunData(tags=[name]))


def lost_run(rank_run: RankRun, name: str | None) -> Run:
    """A run that could not be made, with an id that nobody knows."""
    run_id = uuid.uuid4().hex
    info = RunInfo(
        run_id=run_id,
        experiment_id=rank_run.experiment_id,
        user_id="",
        status=RunStatus.to_string(RunStatus.RUNNING),
        start_time=get_current_time_millis(),
        end_time=None,
        lifecycle_stage=LifecycleStage.ACTIVE,
        run_name=name or run_id,
    )
    return Run(info, RunData())


def experiment(rank_run: RankRun) -> Experiment:
    """The experiment of the launch's run."""
    return Experiment(
        rank_run.experiment_id,
        rank_run.experiment_name or "",
        artifact_location="",
        lifecycle_stage=LifecycleStage.ACTIVE,
    )
