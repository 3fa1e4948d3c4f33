"""Finds or makes the MLflow run of a launch, and its experiment."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from air_nb.protocol.tracking import TrackingRequest
from air_nb.runs.directory import RunRecord
from air_nb.tracking.facts import RUN_ID_TAG, opening_tags
from air_nb.tracking.mlflow_run import MlflowRun
from air_nb.tracking.store import Store, StoreError

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["open_run"]

_DEFAULT_EXPERIMENT_ID = "0"
_DELETED = "deleted"


def open_run(
    store: Store, request: TrackingRequest, record: RunRecord, known_id: str | None, *, tried_before: bool
) -> MlflowRun:
    """Find the run if there is one already, else make it.

    Args:
        store: Where it is to be.
        request: What the kernel asks for.
        record: Our record of the run.
        known_id: Of the MLflow run, if a tracking process has made or found it before.
        tried_before: There was an attempt of which nobody saw the answer: the store may have made a run nevertheless.

    Raises:
        StoreError: It can't be done.
    """
    wanted = known_id or request.resume_run_id
    if wanted is not None:
        return _resume(store, wanted, record, is_new_to_us=known_id is None)
    experiment_id, experiment_name = _experiment(store, request)
    found = _find(store, experiment_id, record.run_id) if tried_before else None
    run_id = found or _create(store, experiment_id, request, record)
    return MlflowRun(store, run_id, experiment_id, experiment_name, is_resumed=False, own_id=record.run_id)


def _resume(store: Store, run_id: str, record: RunRecord, *, is_new_to_us: bool) -> MlflowRun:
    run = store.ask(lambda client: client.get_run(run_id))
    if run.info.lifecycle_stage == _DELETED:
        how = f"MlflowClient({store.uri!r}).restore_run({run_id!r}) brings it back"
        raise StoreError(store.uri, f"run {run_id} was deleted; {how}")
    experiment_id = run.info.experiment_id
    name = store.ask(lambda client: client.get_experiment(experiment_id).name)
    resumed = MlflowRun(store, run_id, experiment_id, name, is_resumed=True, own_id=record.run_id)
    if is_new_to_us:
        store.ask(lambda client: client.update_run(run_id, status="RUNNING"))
        resumed.prove_usable()  # the tag that it is found by
    return resumed


def _experiment(store: Store, request: TrackingRequest) -> tuple[str, str]:
    name = request.experiment_name
    if request.experiment_id is not None or name is None:
        experiment_id = request.experiment_id or _DEFAULT_EXPERIMENT_ID
        return _active(store, store.ask(lambda client: client.get_experiment(experiment_id)))
    return _active(store, store.ask(lambda client: _by_name(client, name)) or _create_experiment(store, name))


def _by_name(client: MlflowClient, name: str) -> Any:
    return client.get_experiment_by_name(name)


def _create_experiment(store: Store, name: str) -> Any:
    try:
        experiment_id = store.create_experiment(name)
    except StoreError:
        # Somebody else may have made it since we looked.
        experiment = store.ask(lambda client: _by_name(client, name))
        if experiment is None:
            raise
        return experiment
    return store.ask(lambda client: client.get_experiment(experiment_id))


def _active(store: Store, experiment: Any) -> tuple[str, str]:
    if experiment.lifecycle_stage == _DELETED:
        number = experiment.experiment_id
        command = f"MLFLOW_TRACKING_URI={shlex.quote(store.uri)} mlflow experiments restore --experiment-id {number}"
        how = f"`{command}` brings it back, or choose another one"
        raise StoreError(store.uri, f"experiment {experiment.name!r} was deleted; {how}")
    return experiment.experiment_id, experiment.name


def _find(store: Store, experiment_id: str, own_id: str) -> str | None:
    query = f"tags.`{RUN_ID_TAG}` = '{own_id}'"
    found = store.ask(lambda client: client.search_runs([experiment_id], query, max_results=1))
    return found[0].info.run_id if found else None


def _create(store: Store, experiment_id: str, request: TrackingRequest, record: RunRecord) -> str:
    tags = opening_tags(request, record)
    started_ms = int(record.created_at * 1000)
    run = store.ask(lambda client: client.create_run(experiment_id, started_ms, tags, request.run_name))
    return str(run.info.run_id)
