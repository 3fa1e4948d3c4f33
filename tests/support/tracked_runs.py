"""Runs for the tracking process that need no kernel and no rank: a directory, as a launch leaves it, and its spools."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from air_nb.protocol.messages import RunState
from air_nb.protocol.tracking import REQUEST_FILE, TrackedRun, TrackedState, TrackingRequest, spool_name
from air_nb.runs.directory import RunDirectory, RunRecord, locate
from air_nb.runs.liveness import ProcessId
from air_nb.runs.unsent import read_tracked
from air_nb.tracking.spool import SpoolEntry

__all__ = ["LaunchedRun", "end_launched_runs", "tracking_environment"]

_PATIENCE_S = 60.0
EXPERIMENT = "an experiment"
_launched: list[RunDirectory] = []  # since the last end_launched_runs


def tracking_environment(**more: str) -> dict[str, str]:
    """What a kernel would send along: this process's environment, without what belongs to the tests."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {**kept, "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false", **more}


def end_launched_runs() -> None:
    """Close the records that a test has left open: they would be live for as long as the test process is."""
    for directory in _launched:
        with contextlib.suppress(FileNotFoundError):
            locate(directory.path).close_record(state=RunState.KILLED, ended_at=time.time())
    _launched.clear()


class LaunchedRun:
    """A run of which nobody but the tracking process knows that it has no ranks.

    Args:
        uri: Tracking URI.
        cwd: Working directory of its kernel.
        nproc: Number of ranks.
        kernel: Kernel that is said to have launched it; this process if it is None.
        request: Further fields of the request.
    """

    def __init__(self, uri: str, cwd: Path, *, nproc: int = 2, kernel: ProcessId | None = None, **request: Any) -> None:
        directory = RunDirectory.create()
        self.path = directory.path
        self.run_id = directory.run_id
        owner = kernel or ProcessId.own()
        directory.write_record(
            RunRecord(self.run_id, "calm-otter-41", RunState.RUNNING, time.time(), nproc, "cpu", kernel=owner)
        )
        _launched.append(directory)
        directory.write_private("cell.py", "print('hello')\n")
        fields = {"experiment_name": EXPERIMENT, "params": {"air_nb.device": "cpu"}, **request}
        directory.write_private(REQUEST_FILE, TrackingRequest("calm-otter-41", uri, cwd=str(cwd), **fields).encode())

    @classmethod
    def at(cls, path: Path) -> LaunchedRun:
        """The one that another process has launched."""
        run = cls.__new__(cls)
        run.path, run.run_id = path, path.name
        return run

    def log(self, rank: int = 0, **entry: Any) -> None:
        """As a rank: leave an entry in the spool."""
        # Not by a Spool, which keeps its file open until the process ends.
        (self.path / spool_name(rank)).parent.mkdir(exist_ok=True)
        with (self.path / spool_name(rank)).open("ab", buffering=0) as file:
            file.write(SpoolEntry(**entry).encode())

    def log_metric(self, key: str, value: float, step: int = 0, rank: int = 0) -> None:
        """As a rank: log a metric."""
        self.log(rank, metrics=[(key, value, int(time.time() * 1000), step)])

    def write_log(self, text: str, rank: int = 0, stream: str = "out") -> None:
        """As a rank: print."""
        with (self.path / f"rank_{rank}.{stream}").open("a") as file:
            file.write(text)

    def close_record(self, state: RunState = RunState.FINISHED, **fields: Any) -> None:
        """As the launcher: record how it ended."""
        locate(self.path).close_record(state=state, **{"ended_at": time.time(), **fields})

    @property
    def tracked(self) -> TrackedRun:
        """What the tracking process says of it; of one that it has not looked at, that it is pending."""
        return read_tracked(self.path) or TrackedRun(TrackedState.PENDING, "")

    def wait(self, holds: Callable[[TrackedRun], bool], timeout_s: float = _PATIENCE_S) -> TrackedRun:
        """Wait for the tracking process to get there.

        Raises:
            TimeoutError: It did not.
        """
        end = time.monotonic() + timeout_s
        while not holds(tracked := self.tracked):
            if time.monotonic() > end:
                raise TimeoutError(f"not there in {timeout_s:g} s: {tracked}")
            time.sleep(0.02)
        return tracked

    def wait_open(self) -> str:
        """Wait until there is an MLflow run; its id."""
        run_id = self.wait(lambda tracked: tracked.state is not TrackedState.PENDING).mlflow_run_id
        assert run_id is not None
        return run_id

    def wait_problem(self) -> str:
        """Wait until there is a problem."""
        problem = self.wait(lambda tracked: tracked.problem is not None).problem
        assert problem is not None
        return problem

    def wait_ended(self) -> TrackedRun:
        """Wait until all was sent."""
        return self.wait(lambda tracked: tracked.state is TrackedState.ENDED)
