"""What has to be done for one run, as steps that can be repeated: after a failure, or in another process.

Used by one thread at a time. Steps raise ``StoreError`` if the store is not there; what was done before it stays done.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from air_nb.protocol.tracking import TrackedState
from air_nb.runs.directory import RunRecord, locate
from air_nb.tracking.artifacts import Artifacts
from air_nb.tracking.facts import ending, git_state, git_values
from air_nb.tracking.forward import Forwarder
from air_nb.tracking.mlflow_run import MlflowRun
from air_nb.tracking.opening import open_run
from air_nb.tracking.store import Store
from air_nb.tracking.system_metrics import SystemMetrics
from air_nb.tracking.tracked_file import TrackedFile, read_request

__all__ = ["BusyError", "Sender"]

_LOCK_FILE = "mlflow.lock"
_METRICS_END_S = 1.0


class BusyError(Exception):
    """Another tracking process is at it."""


class Sender:
    """One run on its way to MLflow.

    Args:
        path: Run directory; it may be moved home meanwhile.

    Raises:
        OSError, ValueError: The run is not tracked, or its files can't be read.
        BusyError: Another tracking process is at it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._request = read_request(path)
        self._record = self.read_record()
        self._lock = _lock(locate(path).path / _LOCK_FILE)
        self.tracked = TrackedFile(path, self._request)
        self.store = Store(self._request)
        self._forwarder = Forwarder(path, self._record.nproc, self.tracked)
        self._run: MlflowRun | None = None
        self._artifacts: Artifacts | None = None
        self._metrics: SystemMetrics | None = None
        self._described = False

    def close(self) -> None:
        """Let others at it."""
        if self._metrics is not None:
            self._metrics.stop(0)
        os.close(self._lock)

    def read_record(self) -> RunRecord:
        """Our record of the run, as it is now."""
        return locate(self._path).read_record()

    def open(self) -> None:
        """Find or make the MLflow run, and say at once which it is: ranks wait for that."""
        if self._run is not None:
            return
        tried_before = self.tracked.exists
        self.tracked.update()  # so that whoever comes next knows
        known_id = self.tracked.now.mlflow_run_id
        run = open_run(self.store, self._request, self._record, known_id, tried_before=tried_before)
        self._run = run
        self._artifacts = Artifacts(self._path, run, self.tracked)
        self.tracked.update(
            state=TrackedState.OPEN,
            mlflow_run_id=run.run_id,
            experiment_id=run.experiment_id,
            experiment_name=run.experiment_name,
            problem=None,
        )

    def watch_system(self) -> None:
        """Have system metrics sampled from now on."""
        if self._metrics is None:
            self._metrics = SystemMetrics(self._opened, self._request.tracking_uri)
            self._metrics.start()

    def describe(self) -> None:
        """Send what is known of the run from the start: parameters, git, source, names."""
        if self._described:
            return
        git_params, git_tags = git_values(git_state(self._request.cwd))
        self._opened.describe(self._request.params | git_params, git_tags)
        self._files.describe(self._request.captured)
        self._described = True

    def forward(self) -> bool:
        """Send a part of what the ranks have logged; whether there was anything."""
        return self._forwarder.forward(self._opened, self._files)

    def send_logs(self, *, final: bool) -> None:
        """Send the ranks' output, if it is time."""
        self._files.send_logs(final=final)

    def terminate(self) -> None:
        """Write the final status."""
        if self._metrics is not None:
            self._metrics.stop(_METRICS_END_S)
        self._opened.terminate(ending(self.read_record()))

    def finish(self) -> None:
        """Send all that is left, then the final status. The run's record is final."""
        self.describe()
        while self.forward():
            pass
        self.send_logs(final=True)
        self.terminate()
        self.tracked.update(state=TrackedState.ENDED, problem=None)

    @property
    def _opened(self) -> MlflowRun:
        assert self._run is not None, "open() comes first"
        return self._run

    @property
    def _files(self) -> Artifacts:
        assert self._artifacts is not None, "open() comes first"
        return self._artifacts


def _lock(path: Path) -> int:
    """Take the run for this process; the lock goes with the descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BusyError from None
    except OSError:
        pass  # a file system without locks: two that send the same is what stores can cope with
    return descriptor
