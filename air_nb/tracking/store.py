"""One tracking store, and everything that can be wrong with it as one exception with a sentence for the user.

Runs in the tracking process, on the thread of the run. Every call to MLflow goes through ``Store.ask``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from air_nb.tracking.causes import cause, is_passing, mask_passwords
from air_nb.tracking.links import is_database

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from air_nb.protocol.tracking import TrackingRequest

__all__ = ["Store", "StoreError", "use_environment"]

_T = TypeVar("_T")

# MLflow waits for a server for minutes: 5 retries of 120 s each. Retrying is ours (air_nb.tracking.run), and a call
# that takes long is reported while it does, so the timeout need only be one that a slow server keeps.
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "PGCONNECT_TIMEOUT": "5",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # this process is started without the user's asking
}
_QUIET = {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
# What is meant for the user's own process.
_NOT_OURS = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_ACTIVE_MODEL_ID")
_CONNECT_ATTEMPTS = 2  # of MLflow's 10, which take it a minute and a half


_preparing = threading.Lock()


class StoreError(Exception):
    """Something could not be done with a tracking store.

    Attributes:
        uri: Of the store, without the password.
        why: What failed.
        passing: Whether it is about the connection or the load, so that the same may work later. If not, the store
            has looked at what it was given, and refused it or stumbled over it.
    """

    def __init__(self, uri: str, why: str, *, passing: bool = False) -> None:
        super().__init__(f"{uri}: {why}")
        self.uri = uri
        self.why = why
        self.passing = passing


def use_environment(env: dict[str, str]) -> None:
    """Make the kernel's environment this process's own; what the user has not set is set for short waits."""
    wanted = _DEFAULTS | env | _QUIET
    for name in _NOT_OURS:
        wanted.pop(name, None)
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:  # C libraries read it on other threads: nothing is touched without need
            os.environ[name] = value


class Store:
    """The store of one run.

    Attributes:
        uri: Its URI without the password.
        waiting_since: When the call that is on has begun, as of ``time.monotonic``; None between calls.
    """

    def __init__(self, request: TrackingRequest) -> None:
        self._request = request
        self.uri = mask_passwords(request.tracking_uri)
        self.waiting_since: float | None = None
        self._client: MlflowClient | None = None

    def ask(self, function: Callable[[MlflowClient], _T], *, bulky: bool = False) -> _T:
        """Call MLflow.

        Args:
            function: Is given the client.
            bulky: It may take long for a good reason: an upload.

        Raises:
            StoreError: It failed.
        """
        self.waiting_since = None if bulky else time.monotonic()
        try:
            if self._client is None:
                self._client = self._connect()
            return function(self._client)
        except StoreError:
            raise
        except Exception as error:  # border: MLflow raises what requests, SQLAlchemy and cloud libraries do
            raise StoreError(self.uri, cause(error), passing=is_passing(error)) from error
        finally:
            self.waiting_since = None

    def create_experiment(self, name: str) -> str:
        """Make an experiment and return its id.

        In a database, its artifacts are to be where MLflow itself would have them: below the kernel's directory, not
        this process's.
        """
        return self.ask(lambda client: self._make_experiment(client, name))

    def _make_experiment(self, client: MlflowClient, name: str) -> str:
        if self._is_database:
            return str(self._database_store().create_experiment(name, artifact_location=None, tags=[]))
        return str(client.create_experiment(name))

    def _connect(self) -> MlflowClient:
        from mlflow import MlflowClient

        with _preparing:
            if self._is_database:
                self._prepare_database()
            return MlflowClient(self._request.tracking_uri, registry_uri=self._request.registry_uri)

    @property
    def _is_database(self) -> bool:
        return is_database(self._request.tracking_uri) and not self._request.tracking_uri.startswith("file:")

    def _prepare_database(self) -> None:
        """Make the tables if there are none, one process at a time; and the default experiment.

        MLflow's own lock is one for each database, but its migrations keep their state in globals: two databases that
        were made at once by two threads stayed half made for ever ("no such column: metrics.is_nan").
        """
        from mlflow.store.db import utils

        utils.MAX_RETRY_COUNT = _CONNECT_ATTEMPTS
        engine = utils.create_sqlalchemy_engine_with_retry(self._request.tracking_uri)
        try:
            utils._safe_initialize_tables(engine)  # noqa: SLF001 - guarded by a canary test
        finally:
            engine.dispose()
        self._database_store()

    def _database_store(self) -> Any:
        """Cached by MLflow, one per URI and artifact root."""
        from mlflow.tracking._tracking_service.utils import _get_store

        return _get_store(self._request.tracking_uri, str(Path(self._request.cwd) / "mlruns"))
