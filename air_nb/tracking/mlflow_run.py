"""One run in a store: what is done to it, in a call or two of MLflow's client each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from air_nb.tracking.facts import RUN_ID_TAG, Ending
from air_nb.tracking.store import Store

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["MlflowRun"]


@dataclass(frozen=True, slots=True)
class MlflowRun:
    """See the module; every method raises ``StoreError`` if it can't be done.

    Attributes:
        store: Where it is.
        run_id: Its MLflow id.
        experiment_id: Its experiment.
        experiment_name: Likewise.
        is_resumed: Whether it was there before, and may have parameters that differ from ours.
        own_id: Our id of the run.
    """

    store: Store
    run_id: str
    experiment_id: str
    experiment_name: str
    is_resumed: bool
    own_id: str

    def log_batch(
        self,
        metrics: Sequence[tuple[str, float, int, int]] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log within MLflow's limits; all of it or, where a value is refused, some."""
        from mlflow.entities import Metric, Param, RunTag

        fields: dict[str, Any] = {
            "metrics": [Metric(key, value, at_ms, step) for key, value, at_ms, step in metrics],
            "params": [Param(key, value) for key, value in (params or {}).items()],
            "tags": [RunTag(key, value) for key, value in (tags or {}).items()],
        }
        self.store.ask(lambda client: client.log_batch(self.run_id, **fields, synchronous=True))

    def prove_usable(self) -> None:
        """Write something harmless: a tag that it has."""
        self.log_batch(tags={RUN_ID_TAG: self.own_id})

    def log_files(self, source: Path, artifact_path: str | None) -> None:
        """Send a file, or the contents of a directory, as artifacts."""

        def log(client: MlflowClient) -> None:
            if source.is_dir():
                client.log_artifacts(self.run_id, str(source), artifact_path)
            else:
                client.log_artifact(self.run_id, str(source), artifact_path)

        self.store.ask(log, bulky=True)

    def describe(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Log our own parameters; those that a resumed run has with another value become tags."""
        tags = dict(tags)
        params = dict(params)
        if self.is_resumed:
            had = self.store.ask(lambda client: client.get_run(self.run_id).data.params)
            tags |= {key: value for key, value in params.items() if had.get(key, value) != value}
            params = {key: value for key, value in params.items() if key not in had}
        self.log_batch(params=params, tags=tags)

    def terminate(self, ending: Ending) -> None:
        """Write the final status, before it the tags that say why; children that a rank left running end likewise."""
        if ending.tags:
            self.log_batch(tags=ending.tags)
        children = self._running_children()

        def terminate(client: MlflowClient) -> None:
            for run_id in [*children, self.run_id]:
                client.set_terminated(run_id, ending.status, ending.ended_ms)

        self.store.ask(terminate)

    def _running_children(self) -> list[str]:
        query = f"tags.`mlflow.parentRunId` = '{self.run_id}' and attributes.status = 'RUNNING'"
        found = self.store.ask(lambda client: client.search_runs([self.experiment_id], query))
        return [run.info.run_id for run in found]
