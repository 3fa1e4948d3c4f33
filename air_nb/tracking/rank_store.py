"""Stands between MLflow's client and its store in a rank: what is logged into the rank's run goes to the spool.

Imported by ``rank_fluent``. What concerns other runs, and all reading, is left to MLflow's own store, built when it is
first needed: opening a database costs a rank half a second and may fail, and code that only logs needs none.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.entities.paged_list import PagedList
from mlflow.utils.async_logging.run_operations import RunOperations
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME, MLFLOW_RUN_NOTE
from mlflow.utils.validation import (
    _validate_batch_log_data,
    _validate_batch_log_limits,
    _validate_param_keys_unique,
)

from air_nb.tracking import rank_stand_ins as stand_ins
from air_nb.tracking.rank_run import RankRun
from air_nb.tracking.spool import SpoolEntry

__all__ = ["RankStore", "is_no_answer"]

# What MLflow's client and stores say when they got no answer, as against "there is no such run".
_NO_ANSWER = {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "UNAUTHENTICATED"}


def is_no_answer(error: MlflowException) -> bool:
    """Whether it says that the server could not be asked, not that the request was wrong."""
    return error.error_code in _NO_ANSWER


_Answer = TypeVar("_Answer")


class RankStore:
    """A tracking store, as MLflow's client uses one.

    ``isinstance`` sees the class of MLflow's own store; whatever is not defined here is that store's.

    Args:
        run: The run that this rank logs into.
        build: Makes MLflow's own store.
    """

    def __init__(self, run: RankRun, build: Callable[[], Any]) -> None:
        self._run = run
        self._build = build
        self._built: Any = None
        self._building = threading.Lock()
        self._here = threading.local()
        self._params: dict[str, str] = {}
        self._lost: set[str] = set()
        self._has_warned = False
        self.has_models = False

    # ------------------------------------------------------------------------------------------------ what is logged

    def log_metric(self, run_id: str, metric: Metric) -> None:
        """Into the spool, or another run."""
        if self._is_other(run_id):
            self._real().log_metric(run_id, metric)
        else:
            self._keep(run_id, metrics=[metric])

    def log_param(self, run_id: str, param: Param) -> None:
        """Into the spool, or another run."""
        if self._is_other(run_id):
            self._real().log_param(run_id, param)
        else:
            self._keep(run_id, params=[param])

    def set_tag(self, run_id: str, tag: RunTag) -> None:
        """Into the spool, or another run."""
        if self._is_other(run_id):
            self._real().set_tag(run_id, tag)
        else:
            self._keep(run_id, tags=[tag])

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric], params: Sequence[Param], tags: Sequence[RunTag]
    ) -> None:
        """Into the spool, or another run."""
        if self._is_other(run_id):
            self._real().log_batch(run_id=run_id, metrics=metrics, params=params, tags=tags)
        else:
            self._keep(run_id, metrics, params, tags)

    def log_metric_async(self, run_id: str, metric: Metric) -> Any:
        """As ``log_metric``: the spool is never waited for."""
        return self.log_batch_async(run_id, [metric], [], [])

    def log_param_async(self, run_id: str, param: Param) -> Any:
        """As ``log_param``."""
        return self.log_batch_async(run_id, [], [param], [])

    def set_tag_async(self, run_id: str, tag: RunTag) -> Any:
        """As ``set_tag``."""
        return self.log_batch_async(run_id, [], [], [tag])

    def log_batch_async(
        self, run_id: str, metrics: Sequence[Metric], params: Sequence[Param], tags: Sequence[RunTag]
    ) -> Any:
        """As ``log_batch``."""
        if self._is_other(run_id):
            return self._real().log_batch_async(run_id=run_id, metrics=metrics, params=params, tags=tags)
        self._keep(run_id, metrics, params, tags)
        return RunOperations([])

    def log_inputs(self, run_id: str, datasets: Any = None, models: Any = None) -> None:
        """Datasets and models that the run has used; not kept while the server is out of reach."""
        self._pass_on("log_inputs", run_id, datasets=datasets, models=models)

    def log_outputs(self, run_id: str, models: Any) -> None:
        """Models that the run has made; not kept while the server is out of reach."""
        self.has_models = True
        self._pass_on("log_outputs", run_id, models=models)

    def record_logged_model(self, run_id: str, mlflow_model: Any) -> None:
        """The same, as MLflow's older models do it."""
        self._pass_on("record_logged_model", run_id, mlflow_model=mlflow_model)

    def _keep(
        self,
        run_id: str,
        metrics: Sequence[Metric] = (),
        params: Sequence[Param] = (),
        tags: Sequence[RunTag] = (),
    ) -> None:
        """Refuse what the server would refuse, where the user can see it; spool the rest."""
        metrics, params, tags = _validate_batch_log_data(metrics, params, tags)
        _validate_batch_log_limits(metrics, params, tags)
        _validate_param_keys_unique(params)
        if run_id in self._lost:
            return
        for param in params:
            self._refuse_change(param)
        linked = [metric for metric in metrics if metric.model_id is not None or metric.dataset_name is not None]
        if linked and self._send(linked):
            metrics = [metric for metric in metrics if metric not in linked]
        if not (metrics or params or tags):
            return
        entry = SpoolEntry(
            metrics=[(each.key, float(each.value), int(each.timestamp), int(each.step)) for each in metrics],
            params=[(each.key, str(each.value)) for each in params],
            tags=[(each.key, str(each.value)) for each in tags],
        )
        self._run.spool.append(entry)

    def _refuse_change(self, param: Param) -> None:
        known = self._params.setdefault(param.key, param.value)
        if known != param.value:
            raise MlflowException.invalid_parameter_value(
                f"Changing param values is not allowed. Param with key='{param.key}' was already logged with "
                f"value='{known}' for run ID='{self._run.run_id}'. Attempted logging new value '{param.value}'."
            )

    def _send(self, metrics: list[Metric]) -> bool:
        """Log metrics of a logged model or a dataset: a link that the spool has no words for. False: spool them."""

        def send() -> bool:
            self._real().log_batch(run_id=self._run.run_id, metrics=metrics, params=[], tags=[])
            return True

        return self.ask(send, lambda: False)

    # --------------------------------------------------------------------------------------- runs and experiments

    def create_run(
        self, experiment_id: str, user_id: str, start_time: int, tags: Sequence[RunTag], run_name: str | None
    ) -> Any:
        """A child is a real run. A logger that wants a run of its own gets this one: a launch is one run."""
        named = {tag.key: tag.value for tag in tags}
        if MLFLOW_PARENT_RUN_ID in named:
            tags = [RunTag(tag.key, self._id_of(tag.value)) for tag in tags]

            return self.ask(
                lambda: self._real().create_run(experiment_id, user_id, start_time, tags, run_name),
                lambda: self._lose_child(run_name),
            )
        name = run_name or named.get(MLFLOW_RUN_NAME)
        # The others of MLflow's own tags say who started it and from where; that is known better.
        wanted = [(key, str(named[key])) for key in named if not key.startswith("mlflow.") or key == MLFLOW_RUN_NOTE]
        if name or wanted:
            self._run.spool.append(SpoolEntry(tags=wanted, run_name=name))
        return stand_ins.run(self._run, self.artifact_uri)

    def _lose_child(self, run_name: str | None) -> Run:
        child = stand_ins.lost_run(self._run, run_name)
        self._lost.add(child.info.run_id)
        self._warn(f"the nested run {child.info.run_name} could not be made; what it logs is lost")
        return child

    def update_run_info(self, run_id: str, run_status: Any, end_time: int | None, run_name: str | None) -> Any:
        """Of this run only the name: how it ended is known when all ranks have."""
        if self._is_other(run_id):
            return self._real().update_run_info(run_id, run_status, end_time, run_name)
        if run_name and run_id not in self._lost:
            self._run.spool.append(SpoolEntry(run_name=run_name))
        return stand_ins.run(self._run).info

    def create_experiment(self, name: str, artifact_location: str | None = None, tags: Any = None) -> str:  # noqa: ARG002 - MLflow's signature
        """This run's experiment: a logger asks for one of its own to put its run into, and that is this run."""
        return self._run.experiment_id

    def get_experiment(self, experiment_id: str) -> Any:
        """MLflow's, or what is known of this run's without a server."""
        if not self._run.owns_experiment(experiment_id):
            return self._real().get_experiment(experiment_id)
        return self.ask(
            lambda: self._real().get_experiment(self._run.experiment_id), lambda: stand_ins.experiment(self._run)
        )

    def get_experiment_by_name(self, experiment_name: str) -> Any:
        """MLflow's, or what is known of this run's without a server."""
        is_ours = experiment_name == self._run.experiment_name
        return self.ask(
            lambda: self._real().get_experiment_by_name(experiment_name),
            lambda: stand_ins.experiment(self._run) if is_ours else None,
        )

    def search_experiments(self, *args: Any, **kwargs: Any) -> Any:
        """MLflow's; none without a server."""
        return self.ask(lambda: self._real().search_experiments(*args, **kwargs), lambda: PagedList([], None))

    # -------------------------------------------------------------------------------------------------- reading back

    def get_run(self, run_id: str) -> Any:
        """With all that this rank has logged."""
        if self._is_other(run_id):
            return self._real().get_run(run_id)
        if run_id not in self._lost and not getattr(self._here, "is_in_no_need", False):
            self._run.await_sent()
        return self.ask(lambda: self._real().get_run(self._run.run_id), lambda: stand_ins.run(self._run))

    def get_metric_history(self, run_id: str, *args: Any, **kwargs: Any) -> Any:
        """With all that this rank has logged."""
        self._run.await_sent()
        return self._real().get_metric_history(self._id_of(run_id), *args, **kwargs)

    def search_runs(self, *args: Any, **kwargs: Any) -> Any:
        """With all that this rank has logged."""
        self._run.await_sent()
        return self._real().search_runs(*args, **kwargs)

    def delete_tag(self, run_id: str, key: str) -> None:
        """The tag is deleted after it has been set."""
        self._run.await_sent()
        self._real().delete_tag(self._id_of(run_id), key)

    def artifact_uri(self) -> str | None:
        """Of this run; None if the server can't be asked."""
        with self.unsynchronised():
            uri: str | None = self.get_run(self._run.run_id).info.artifact_uri
        return uri

    @contextlib.contextmanager
    def unsynchronised(self) -> Iterator[None]:
        """Reading this run doesn't wait for what is spooled, in this thread: what is wanted is no matter of logging."""
        self._here.is_in_no_need = True
        try:
            yield
        finally:
            self._here.is_in_no_need = False

    # --------------------------------------------------------------------------------------------- MLflow's own store

    def flush_async_logging(self) -> None:
        """Nothing waits but in MLflow's own store."""
        if self._built is not None:
            self._built.flush_async_logging()

    def shut_down_async_logging(self) -> None:
        """Nothing waits but in MLflow's own store."""
        if self._built is not None:
            self._built.shut_down_async_logging()

    def ask(self, question: Callable[[], _Answer], otherwise: Callable[[], _Answer]) -> _Answer:
        """Ask the server, unless it is known not to answer; a server that gives none never ends a training."""
        if self._run.is_out_of_reach():
            return otherwise()
        try:
            return question()
        except MlflowException as error:
            if not is_no_answer(error):
                raise
            self._warn(str(error))
            return otherwise()

    def _pass_on(self, method: str, run_id: str, **arguments: Any) -> None:
        if run_id in self._lost:
            return
        if self._is_other(run_id):
            getattr(self._real(), method)(run_id, **arguments)
        else:
            self.ask(lambda: getattr(self._real(), method)(self._run.run_id, **arguments), lambda: None)

    def _is_other(self, run_id: str) -> bool:
        return not self._run.owns(run_id) and run_id not in self._lost

    def _id_of(self, run_id: str) -> str:
        return self._run.run_id if self._run.owns(run_id) else run_id

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            sys.stderr.write(f"air_nb: MLflow at {self._run.request.tracking_uri} does not answer: {problem}\n")

    def _real(self) -> Any:
        with self._building:
            if self._built is None:
                self._built = self._open()
            return self._built

    def _open(self) -> Any:
        try:
            return self._build()
        except MlflowException:
            raise
        except Exception as error:  # a database's driver raises what it likes
            raise MlflowException(f"the store could not be opened: {error}") from error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)

    @property  # type: ignore[misc] # read-only is what a proxy needs
    def __class__(self) -> type:
        if self._run.is_out_of_reach():
            return type(self)
        try:
            return type(self._real())
        except MlflowException:
            return type(self)  # whoever asks is told by the next call
