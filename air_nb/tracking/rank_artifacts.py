"""Artifacts of a rank go where MLflow puts them; while its server is out of reach, a copy waits in the run directory.

Imported by ``rank_fluent``. The tracking process, or a later upload, sends the copies.
"""

from __future__ import annotations

import functools
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.tracking._tracking_service.client import TrackingServiceClient

from air_nb.tracking.rank_run import RankRun
from air_nb.tracking.rank_store import RankStore, is_no_answer
from air_nb.tracking.spool import SpoolEntry

__all__ = ["ARTIFACTS_DIRECTORY", "install"]

ARTIFACTS_DIRECTORY = "mlflow_artifacts"


def install(run: RankRun) -> None:
    """Teach MLflow's client, the class: every client of this process that logs to the run's store."""
    for name, ours in (
        ("log_artifact", _log_artifact),
        ("log_artifacts", _log_artifacts),
        ("_log_artifact_async", _log_image),
        ("list_artifacts", _list_artifacts),
    ):
        setattr(TrackingServiceClient, name, _for_our_run(run, getattr(TrackingServiceClient, name), ours))


def _for_our_run(run: RankRun, original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(client: TrackingServiceClient, run_id: str, *args: Any, **kwargs: Any) -> Any:
        if not run.has_store(client.tracking_uri) or not run.owns(run_id):
            return original(client, run_id, *args, **kwargs)

        def through_mlflow() -> Any:
            store = client.store
            assert type(store) is RankStore
            with store.unsynchronised():
                return original(client, run.run_id, *args, **kwargs)

        return ours(run, through_mlflow, *args, **kwargs)

    return method


def _log_artifact(
    run: RankRun, through_mlflow: Callable[[], Any], local_path: str, artifact_path: str | None = None
) -> None:
    if Path(local_path).is_dir():  # its name is part of where it goes
        artifact_path = str(Path(artifact_path or "", Path(local_path).resolve().name))
    _send_or_copy(run, through_mlflow, local_path, artifact_path)


def _log_artifacts(
    run: RankRun, through_mlflow: Callable[[], Any], local_dir: str, artifact_path: str | None = None
) -> None:
    _send_or_copy(run, through_mlflow, local_dir, artifact_path)


def _log_image(
    run: RankRun,
    through_mlflow: Callable[[], Any],
    filename: str,
    artifact_path: str | None = None,
    artifact: Any = None,
) -> None:
    if run.is_out_of_reach():
        _keep(run, filename, artifact_path, artifact.save)
    else:
        through_mlflow()  # another thread of MLflow's sends it


def _list_artifacts(run: RankRun, through_mlflow: Callable[[], Any], path: str | None = None) -> Any:  # noqa: ARG001 - MLflow's signature
    return [] if run.is_out_of_reach() else through_mlflow()


def _send_or_copy(run: RankRun, through_mlflow: Callable[[], Any], local_path: str, artifact_path: str | None) -> None:
    source = Path(local_path)
    if source.exists() and run.is_out_of_reach():
        _copy(run, source, artifact_path)
        return
    try:
        through_mlflow()
    except Exception as error:  # a storage's client raises what it likes
        if not source.exists() or (isinstance(error, MlflowException) and not is_no_answer(error)):
            raise  # the caller's own mistake
        sys.stderr.write(f"air_nb: MLflow did not take the artifact {local_path} ({error}): a copy waits to be sent\n")
        _copy(run, source, artifact_path)


def _copy(run: RankRun, source: Path, artifact_path: str | None) -> None:
    if source.is_dir():
        _keep(run, source.resolve().name, artifact_path, lambda target: shutil.copytree(source, target))
    else:
        _keep(run, source.name, artifact_path, lambda target: shutil.copy(source, target))


def _keep(run: RankRun, name: str, artifact_path: str | None, write: Callable[[Path], Any]) -> None:
    """Have it written into a directory of its own, so that a second one of that name replaces nothing."""
    relative = Path(ARTIFACTS_DIRECTORY, uuid.uuid4().hex, name)
    target = run.directory / relative
    try:
        target.parent.mkdir(parents=True, mode=0o700)
        write(target)
    except OSError as error:
        sys.stderr.write(f"air_nb: the artifact {name} could not be kept in {target} ({error}) and is lost\n")
        return
    run.spool.append(SpoolEntry(artifact=(str(relative), artifact_path or None)))
