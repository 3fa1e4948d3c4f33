"""The MLflow run of a rank, as far as its run directory tells: which one it is, whether MLflow answers, what was sent.

Runs in a rank. Reads what the tracking process writes (``mlflow.json``) and asks no server. Does not import MLflow.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

from air_nb.protocol.tracking import (
    REQUEST_FILE,
    TRACKED_FILE,
    TrackedRun,
    TrackedState,
    TrackingRequest,
    spool_name,
)
from air_nb.tracking.spool import Spool, rank_spool

__all__ = ["RankRun"]

_WAIT_S = 5.0
_POLL_S = 0.01
_SQLITE = "sqlite:///"


class RankRun:
    """This rank's view of the run.

    Until the tracking process has made the run, it has a stand-in id, under which everything can be logged all the
    same: the spool knows no ids. Ids that were handed out stay valid when the true one is known.

    Args:
        directory: Run directory.
        rank: Global rank.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        self.request = TrackingRequest.decode((directory / REQUEST_FILE).read_text())
        self._tracked = TrackedRun(TrackedState.PENDING, self.request.tracking_uri)
        self._stamp: tuple[int, int] | None = None
        self._stand_in = uuid.uuid4().hex
        self._on_open: list[Callable[[], None]] = []

    @property
    def spool(self) -> Spool:
        """Where what is logged goes."""
        return rank_spool(self.directory, self.rank)

    @property
    def run_id(self) -> str:
        """MLflow's id of the run; a stand-in until it is known."""
        return self._tracked.mlflow_run_id or self._stand_in

    @property
    def experiment_id(self) -> str:
        """MLflow's id of the experiment; that of the default experiment until it is known."""
        return self._tracked.experiment_id or self.request.experiment_id or "0"

    @property
    def experiment_name(self) -> str | None:
        """Name of the experiment, if it is known."""
        return self._tracked.experiment_name or self.request.experiment_name

    def owns(self, run_id: str | None) -> bool:
        """Whether it is an id of this run."""
        return run_id is not None and run_id in (self._stand_in, self._tracked.mlflow_run_id)

    def owns_experiment(self, experiment_id: str | None) -> bool:
        """Whether it is the experiment of this run, or may be: nobody knows before the run is made."""
        return self._tracked.experiment_id is None or experiment_id == self._tracked.experiment_id

    def has_store(self, uri: str) -> bool:
        """Whether it is the tracking URI of this run, written in whatever way."""
        return _absolute(uri) == _absolute(self.request.tracking_uri)

    def is_out_of_reach(self) -> bool:
        """Whether MLflow is known not to answer, so that it need not be asked."""
        self._refresh()
        return self._tracked.state is TrackedState.PENDING or self._tracked.problem is not None

    def when_open(self, act: Callable[[], None]) -> None:
        """Call this once MLflow's ids are known, at once if they are."""
        if self._tracked.mlflow_run_id is None:
            self._on_open.append(act)
        else:
            act()

    def await_open(self) -> None:
        """Wait until the run is there or MLflow is known not to answer (bounded). An interrupt ends the wait."""
        self._await(lambda: self._tracked.state is not TrackedState.PENDING)

    def await_sent(self) -> None:
        """Wait until MLflow has all that this rank has logged up to now, or is known not to answer (bounded)."""
        path = self.directory / spool_name(self.rank)
        size = path.stat().st_size if path.exists() else 0
        self._await(lambda: size <= self._sent_bytes())

    def _sent_bytes(self) -> int:
        sent = self._tracked.sent
        return sent[self.rank] if self.rank < len(sent) else 0

    def _await(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        self._refresh()
        while not is_so() and self._tracked.problem is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._refresh()

    def _refresh(self) -> None:
        path = self.directory / TRACKED_FILE
        try:
            now = path.stat()
            stamp = now.st_ino, now.st_mtime_ns
            if stamp == self._stamp:
                return
            self._tracked = TrackedRun.decode(path.read_text())
        except (FileNotFoundError, ValueError):
            return  # not there yet, or of another version: as if it were not there
        self._stamp = stamp
        while self._tracked.mlflow_run_id is not None and self._on_open:
            self._on_open.pop()()


def _absolute(uri: str) -> str:
    if uri.startswith(_SQLITE):
        return _SQLITE + os.path.abspath(unquote(uri.removeprefix(_SQLITE)))  # noqa: PTH100 - absolute() keeps the ..
    return uri.rstrip("/")
