"""The MLflow run of one launch, as the kernel sees it: asked for, never waited for while the ranks start or run.

All calls come from the thread that launched. The tracking process answers through ``mlflow.json`` in the run directory.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from air_nb.protocol.tracking import REQUEST_FILE, TRACKED_FILE, TrackedRun, TrackedState
from air_nb.runs.directory import locate
from air_nb.session.mlflow_state import has_mlflow, is_switched_off, rank_variables
from air_nb.tracking.jupyter_server import find_jupyter_server
from air_nb.tracking.links import run_page

if TYPE_CHECKING:
    from air_nb.options import RunOptions
    from air_nb.protocol.tracking import TrackingRequest
    from air_nb.runs.directory import RunDirectory
    from air_nb.tracking.client import TrackingClient
    from air_nb.tracking.links import Link

__all__ = ["HOOK", "Tracked", "is_tracked", "untracked_note"]

HOOK = "air_nb.tracking.rank_hook:install"
_SHORT_END_S = 0.3  # an error must not wait for a server, nor anything for the first import of MLflow
_END_S = 2.0  # for the next cell to find the run complete
_NOT_INSTALLED = "not tracked: pip install 'air_nb[mlflow]'"


def is_tracked(options: RunOptions) -> bool:
    """Whether a launch is tracked: the user has not switched it off, and MLflow is installed."""
    return options.tracking and not is_switched_off() and has_mlflow()


def untracked_note(options: RunOptions) -> str:
    """Why a launch that could be tracked is not; empty if the user wants it so."""
    wanted = options.tracking and not is_switched_off()
    return _NOT_INSTALLED if wanted and not has_mlflow() else ""


class Tracked:
    """See the module.

    Args:
        client: The tracking process.
        directory: The run.
        request: The MLflow run that is asked for.
    """

    def __init__(self, client: TrackingClient, directory: RunDirectory, request: TrackingRequest) -> None:
        self._client = client
        self._directory = directory
        self._request = request
        self._begun = False
        self._seen_ns = 0
        self._now = TrackedRun(TrackedState.PENDING, request.tracking_uri)
        self._told: set[str] = set()
        directory.write_private(REQUEST_FILE, request.encode())

    @property
    def now(self) -> TrackedRun:
        """The MLflow run as it was at the last ``poll``."""
        return self._now

    @property
    def is_settled(self) -> bool:
        """Whether no more will become known by itself: MLflow has everything, does not answer, or was not asked."""
        return not self._begun or self._now.state == TrackedState.ENDED or self._now.problem is not None

    def rank_variables(self) -> dict[str, str | None]:
        """What the ranks' environment has of it; None takes a variable away."""
        return rank_variables(self._request)

    def begin(self) -> None:
        """Have the run opened; returns at once. Not before the ranks are on their way: they come first."""
        self._begun = True
        self._client.begin(self._directory.path, dict(os.environ))

    def poll(self) -> bool:
        """Look whether ``mlflow.json`` has changed, and read it if so."""
        path = locate(self._directory.path).path / TRACKED_FILE  # moved home, if the run has ended
        with suppress(OSError, ValueError):
            modified_ns = path.stat().st_mtime_ns
            if modified_ns == self._seen_ns:
                return False
            self._now = TrackedRun.decode(path.read_text())
            self._seen_ns = modified_ns
            return True
        return False

    def end(self, *, ok: bool) -> None:
        """The run's record is final: have everything sent and the status written; waits a moment for that."""
        if not self._begun:  # no rank was started: there is nothing to track, later neither
            (self._directory.path / REQUEST_FILE).unlink(missing_ok=True)
            return
        self._client.end(self._directory.path)
        has_ended = self._client.wait_ended(self._directory.path, _SHORT_END_S)
        self.poll()
        is_open = self._now.state == TrackedState.OPEN and self._now.problem is None
        if ok and is_open and not has_ended:
            self._client.wait_ended(self._directory.path, _END_S)
            self.poll()

    def link(self) -> Link | None:
        """To the run's page in MLflow, as soon as there is one."""
        return run_page(self._now, self._directory.run_id, find_jupyter_server())

    def warnings(self) -> list[str]:
        """What the user has to know and has not been told yet, one sentence each."""
        found = {text: f"MLflow refused a value: {text}" for text in self._now.refused}
        if self._now.problem is not None:  # one line, however often the reason changes
            found["problem"] = (
                f"MLflow: {self._now.problem} What run {self._request.run_name} logs is kept in its directory; "
                f"`%air runs --upload {self._directory.run_id}` sends it later."
            )
        new = [text for key, text in found.items() if key not in self._told]
        self._told.update(found)
        return new
