"""Kernel <-> tracking process: one JSON object per line over the process's stdin and stdout.

The environment of the kernel travels here, since servers and stores want its credentials, and is written to no file.
What becomes of a run is not said here but in its directory (``air_nb.protocol.tracking.TrackedRun``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["TRACKING_VERSION", "Begin", "End", "Finish", "Finished", "Message", "Ready", "decode", "encode"]

TRACKING_VERSION = 1


@dataclass(frozen=True, slots=True)
class Begin:
    """Kernel -> tracking process: a run has been launched; its directory has ``tracking.json`` and ``run.json``."""

    directory: str
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class End:
    """Kernel -> tracking process: ``run.json`` is final."""

    directory: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Kernel -> tracking process: send what runs of the past still have; answered by a ``Finished`` for each."""

    number: int
    directories: list[str]
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Ready:
    """Tracking process -> kernel, its first line: MLflow has been imported, or can't be: ``problem``."""

    version: int
    pid: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Tracking process -> kernel: one sentence on what became of a run."""

    number: int
    run_id: str
    outcome: str


Message = Begin | End | Finish | Ready | Finished
_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in (Begin, End, Finish, Ready, Finished)}


def encode(message: Message) -> bytes:
    """One line of JSON."""
    return json.dumps({"type": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Read what ``encode`` wrote.

    Raises:
        ValueError: It is no message of this version.
    """
    try:
        values = json.loads(line)
        message: Message = _TYPES[values.pop("type")](**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # Its type alone: the rest may hold the environment.
        msg = f"not a message between kernel and tracking process ({type(error).__name__})"
        raise ValueError(msg) from error
    return message
