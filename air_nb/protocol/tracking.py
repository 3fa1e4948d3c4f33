"""Kernel -> tracking process -> ranks: what is to be tracked, and as which MLflow run it is.

Both are files of the run directory, replaced by rename: whoever looks sees a whole one, and what could not be sent to a
server that is down can be sent later, by another process, from there alone. The ranks' own metrics, parameters and tags
are spooled below them, one file per rank (``air_nb.tracking.spool``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["REQUEST_FILE", "TRACKED_FILE", "TrackedRun", "TrackedState", "TrackingRequest", "spool_name"]

REQUEST_FILE = "tracking.json"
TRACKED_FILE = "mlflow.json"


def spool_name(rank: int) -> str:
    """Where in the run directory a rank leaves what it logs.

    In a folder of its own: the kernel watches the run directory, and must not wake up for each metric.
    """
    return f"mlflow/rank_{rank}.jsonl"


class TrackedState(StrEnum):
    """PENDING (no MLflow run yet) -> OPEN -> ENDED (final status written, everything sent)."""

    PENDING = "PENDING"
    OPEN = "OPEN"
    ENDED = "ENDED"


@dataclass(frozen=True, slots=True)
class TrackingRequest:
    """The MLflow run that a launch asks for; decided by the kernel, which knows the user's MLflow state.

    Attributes:
        run_name: Name of the run.
        tracking_uri: Absolute tracking URI.
        registry_uri: Registry URI, None for MLflow's default.
        experiment_name: Experiment by name; made if there is none.
        experiment_id: Experiment by id; wins over the name.
        parent_run_id: Run that was active in the kernel: the new one is nested under it.
        resume_run_id: ``MLFLOW_RUN_ID`` of the user: no new run is made.
        cwd: Working directory of the kernel.
        source_name: Notebook or script, for ``mlflow.source.name``.
        params: Parameters of the launch.
        captured: Pickled size in bytes by captured name; never values.
    """

    run_name: str
    tracking_uri: str
    registry_uri: str | None = None
    experiment_name: str | None = None
    experiment_id: str | None = None
    parent_run_id: str | None = None
    resume_run_id: str | None = None
    cwd: str = ""
    source_name: str | None = None
    params: dict[str, str] = field(default_factory=dict)
    captured: dict[str, int] = field(default_factory=dict)

    def encode(self) -> str:
        """JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> TrackingRequest:
        """Read what ``encode`` wrote.

        Raises:
            ValueError: It is not a request of this version.
        """
        return cls(**_fields(cls, text))


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The MLflow run of a launch, as far as it has got.

    Attributes:
        state: See ``TrackedState``.
        tracking_uri: Absolute tracking URI.
        mlflow_run_id: None while PENDING.
        experiment_id: None while PENDING.
        experiment_name: None while PENDING.
        problem: Why nothing could be sent up to now, one sentence; None if all is well.
        refused: What MLflow will never take, one sentence each.
        sent: Bytes of each rank's spool that have been sent, index = rank.
        sent_loading: Likewise of its ``air_nb.runs.loading``.
        sent_checkpoints: How many of the run's checkpoints have been sent.
    """

    state: TrackedState
    tracking_uri: str
    mlflow_run_id: str | None = None
    experiment_id: str | None = None
    experiment_name: str | None = None
    problem: str | None = None
    refused: list[str] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    sent_loading: list[int] = field(default_factory=list)
    sent_checkpoints: int = 0

    def encode(self) -> str:
        """JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> TrackedRun:
        """Read what ``encode`` wrote.

        Raises:
            ValueError: It is not the record of a tracked run of this version.
        """
        values = _fields(cls, text)
        return cls(**{**values, "state": TrackedState(values["state"])})


def _fields(cls: type[TrackingRequest | TrackedRun], text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
        cls(**values)
    except (TypeError, ValueError) as error:
        msg = f"not a {cls.__name__}: {error}"
        raise ValueError(msg) from error
    return dict(values)
