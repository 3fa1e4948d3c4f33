"""MLflow's own functions in a rank: ``start_run``, ``end_run`` and the others mean the run of the launch.

Imported by ``rank_hook`` once the cell has imported MLflow.
"""

# ruff: noqa: SLF001 - there is no other way into an active run; a canary test watches each of the private names

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from mlflow.entities import Metric, RunTag
from mlflow.environment_variables import MLFLOW_ENABLE_ASYNC_LOGGING
from mlflow.exceptions import MlflowException
from mlflow.tracking import fluent
from mlflow.tracking._tracking_service import utils
from mlflow.tracking.metric_value_conversion_utils import convert_metric_value_to_float_if_possible
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from air_nb.tracking import rank_artifacts
from air_nb.tracking import rank_stand_ins as stand_ins
from air_nb.tracking.rank_run import RankRun
from air_nb.tracking.rank_store import RankStore
from air_nb.tracking.spool import SpoolEntry

__all__ = ["MlflowException", "adopt"]


_PLAIN_METRIC = {"key", "value", "step", "timestamp"}


def adopt(run: RankRun) -> None:
    """Make this process's MLflow log into the run. Waits until the run is there (bounded).

    Raises:
        MlflowException: The cell has chosen another store before it imported MLflow.
    """
    _refuse_other_store(run, os.environ.get("MLFLOW_TRACKING_URI"))
    run.await_open()
    utils.set_tracking_uri(run.request.tracking_uri)  # whatever the cell does to the environment from here on
    _put_store_between(run)
    fluent.MLFLOW_RUN_ID = _NoRunId()  # type: ignore[attr-defined, assignment] # a variable of the module
    fluent._active_run_stack.default_factory = lambda: [_active_run(run)]
    fluent._active_run_stack.set([_active_run(run)])
    _replace(fluent.start_run, functools.partial(_start_run, run))
    _replace(fluent.end_run, functools.partial(_end_run, run))
    _replace(fluent.log_metric, functools.partial(_log_metric, run))
    _replace(fluent.set_experiment, functools.partial(_set_experiment, run))
    _replace(utils.set_tracking_uri, functools.partial(_set_tracking_uri, run))
    rank_artifacts.install(run)
    run.when_open(lambda: _publish(run))


def _publish(run: RankRun) -> None:
    """Tell whoever looks at the environment, processes that the rank starts among them."""
    os.environ["MLFLOW_RUN_ID"] = run.run_id
    os.environ["MLFLOW_EXPERIMENT_ID"] = run.experiment_id
    fluent._active_experiment_id = run.experiment_id  # type: ignore[assignment] # None at first


class _NoRunId:
    """Stands for ``MLFLOW_RUN_ID`` in MLflow's own functions, which use the variable up: it stays for our children."""

    name = "MLFLOW_RUN_ID"

    def get(self) -> None:
        """No run to resume: ours is active."""

    def unset(self) -> None:
        """It stays."""


def _put_store_between(run: RankRun) -> None:
    registry = utils._tracking_store_registry
    builder = registry.get_store_builder(run.request.tracking_uri)

    @functools.wraps(builder)
    def build(store_uri: str, artifact_uri: str | None = None) -> Any:
        make = functools.partial(builder, store_uri=store_uri, artifact_uri=artifact_uri)
        return RankStore(run, make) if run.has_store(store_uri) else make()

    for scheme, registered in list(registry._registry.items()):
        if registered is builder:
            registry.register(scheme, build)


def _store(run: RankRun) -> RankStore:
    store = utils._get_store(run.request.tracking_uri)
    assert type(store) is RankStore
    return store


def _active_run(run: RankRun) -> fluent.ActiveRun:
    return fluent.ActiveRun(stand_ins.run(run, lambda: _store(run).artifact_uri()))


def _replace(original: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Put ours in the place of one of MLflow's functions wherever MLflow has it by name."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ours(original, **signature.bind(*args, **kwargs).arguments)

    for name, module in list(sys.modules.items()):
        # MLflow's own module of URIs switches them for a moment, to and fro, and has to.
        is_mlflows = name.partition(".")[0] == "mlflow" and module is not utils
        if is_mlflows and vars(module).get(original.__name__) is original:
            setattr(module, original.__name__, replacement)


def _start_run(run: RankRun, start_run: Callable[..., Any], **given: Any) -> Any:
    """The launch's run, unless a child is asked for. Every call is one to be ended, so that ``with`` blocks nest."""
    stack = fluent._active_run_stack.get()
    wants_ours = run.owns(given.get("run_id"))
    if not wants_ours:
        if stack and not run.owns(stack[-1].info.run_id):
            return start_run(**given)  # inside a child: as ever
        if given.get("nested") or given.get("parent_run_id"):
            if not stack:
                stack.append(_active_run(run))
            return start_run(**{**given, "nested": True})
        _refuse_other_run(run, given)
    _describe_run(run, given)
    stack.append(_active_run(run))
    return stack[-1]


def _refuse_other_run(run: RankRun, given: dict[str, Any]) -> None:
    run_id, experiment_id = given.get("run_id"), given.get("experiment_id")
    if run_id is not None:
        raise MlflowException.invalid_parameter_value(
            f"This cell logs into its own MLflow run {run.run_id}: to log into run {run_id} instead, set MLFLOW_RUN_ID "
            "to it before the cell, or pass nested=True to do so for a while."
        )
    if experiment_id is not None and not run.owns_experiment(str(experiment_id)):
        _refuse_experiment(run, f"with the id {experiment_id}")


def _refuse_experiment(run: RankRun, wanted: str) -> NoReturn:
    raise MlflowException.invalid_parameter_value(
        f"This cell logs into the experiment {run.experiment_name or run.experiment_id!r}: for the one {wanted}, put "
        "--experiment NAME on the line %%distributed (@distributed: experiment=), or call mlflow.set_experiment() "
        "before the cell."
    )


def _describe_run(run: RankRun, given: dict[str, Any]) -> None:
    tags = dict(given.get("tags") or {})
    if given.get("description"):
        tags[MLFLOW_RUN_NOTE] = given["description"]
    if tags:
        _store(run).log_batch(run.run_id, [], [], [RunTag(key, str(value)) for key, value in tags.items()])
    if given.get("run_name"):
        run.spool.append(SpoolEntry(run_name=given["run_name"]))


def _end_run(run: RankRun, end_run: Callable[..., Any], **given: Any) -> None:
    """Leave the launch's run, which ends when the launch does; the next call that logs is in it again."""
    stack = fluent._active_run_stack.get()
    if stack and run.owns(stack[-1].info.run_id):
        fluent._last_active_run_id.set(stack.pop().info.run_id)
    else:
        end_run(**given)


def _log_metric(run: RankRun, log_metric: Callable[..., Any], **given: Any) -> Any:
    """The call of every training loop, without MLflow's way through its client.

    That one looks for pyspark on the whole module path, each time: half a millisecond.
    """
    stack = fluent._active_run_stack.get()
    is_ours = bool(stack) and run.owns(stack[-1].info.run_id)
    is_plain = given.keys() <= _PLAIN_METRIC and not MLFLOW_ENABLE_ASYNC_LOGGING.get()
    if not (is_ours and is_plain) or _store(run).has_models or fluent.get_active_model_id() is not None:
        return log_metric(**given)
    value = convert_metric_value_to_float_if_possible(given["value"])
    at_ms = given.get("timestamp") or time.time_ns() // 1_000_000
    _store(run).log_metric(run.run_id, Metric(given["key"], value, at_ms, given.get("step") or 0))
    return None


def _set_experiment(run: RankRun, set_experiment: Callable[..., Any], **given: Any) -> Any:
    name, experiment_id = given.get("experiment_name"), given.get("experiment_id")
    if name is not None and run.experiment_name not in (None, name):
        _refuse_experiment(run, f"named {name!r}")
    if experiment_id is not None and not run.owns_experiment(str(experiment_id)):
        _refuse_experiment(run, f"with the id {experiment_id}")
    return stand_ins.experiment(run) if run.is_out_of_reach() else set_experiment(**given)


def _set_tracking_uri(run: RankRun, _set_tracking_uri: Callable[..., Any], uri: str | Path | None) -> None:
    _refuse_other_store(run, uri)  # and ours is set


def _refuse_other_store(run: RankRun, uri: str | Path | None) -> None:
    wanted = uri.absolute().as_uri() if isinstance(uri, Path) else uri
    if wanted is not None and not run.has_store(wanted):
        raise MlflowException.invalid_parameter_value(
            f"This cell logs to {run.request.tracking_uri}: to log to {wanted!r}, call mlflow.set_tracking_uri() or "
            "set MLFLOW_TRACKING_URI before the cell."
        )
