"""Kernel <-> launcher: one JSON object per line over the launcher's stdin and stdout.

Payloads, output and results never travel here: they are files of the run directory. The version is checked in the first
line of the launcher, since an upgrade of air_nb can meet a kernel that still has the old one imported.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

__all__ = [
    "PROTOCOL_VERSION",
    "Command",
    "Done",
    "Event",
    "Exited",
    "Interrupt",
    "Kill",
    "Ready",
    "Refused",
    "Retire",
    "Run",
    "RunState",
    "Started",
    "decode",
    "encode",
]

PROTOCOL_VERSION = 1


class RunState(StrEnum):
    """State of a run: STARTING -> RUNNING -> one of FINISHED, FAILED, KILLED, TIMED_OUT (which are final)."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"
    TIMED_OUT = "TIMED_OUT"

    @property
    def is_final(self) -> bool:
        """Whether the run has ended."""
        return self not in (RunState.STARTING, RunState.RUNNING)


@dataclass(frozen=True, slots=True)
class Run:
    """Kernel -> launcher: start a run. The environment travels here, so that it is on no disk."""

    run_id: str
    directory: str
    nproc: int
    env: dict[str, str]
    timeout_s: float | None = None
    max_restarts: int = 0


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Kernel -> launcher: KeyboardInterrupt in every rank, then the stop ladder."""

    run_id: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kernel -> launcher: SIGKILL to every rank, now."""

    run_id: str
    reason: str = "interrupted twice"


@dataclass(frozen=True, slots=True)
class Retire:
    """Kernel -> launcher: end as soon as no run is left."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Launcher -> kernel: the forkserver is warm; ``problem`` says why it can't be used, if so."""

    version: int
    pid: int
    forkserver_pid: int
    warm_s: float
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """Launcher -> kernel: all ranks of an attempt have been forked. ``pids`` by rank."""

    run_id: str
    attempt: int
    pids: list[int]


@dataclass(frozen=True, slots=True)
class Exited:
    """Launcher -> kernel: a rank's process is gone, so no more output of it can come."""

    run_id: str
    rank: int


@dataclass(frozen=True, slots=True)
class Done:
    """Launcher -> kernel: no process of the run is left.

    Attributes:
        run_id: The run.
        state: How it ended.
        failures: ``RankFailure`` fields as dicts, the cause first.
        finished: Ranks that ended well.
        reason: Why it was stopped, for KILLED and TIMED_OUT; or what failed outside the ranks.
        undead: Pids that survived SIGKILL (a process stuck in a driver).
        unresponsive: Ranks that did not end at SIGINT when the run was interrupted.
    """

    run_id: str
    state: str
    failures: list[dict[str, Any]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    reason: str = ""
    undead: list[int] = field(default_factory=list)
    unresponsive: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Refused:
    """Launcher -> kernel: the run could not be started at all."""

    run_id: str
    reason: str


Command = Run | Interrupt | Kill | Retire
Event = Ready | Started | Exited | Done | Refused
_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (Run, Interrupt, Kill, Retire, Ready, Started, Exited, Done, Refused)
}


def encode(message: Command | Event) -> bytes:
    """One line of JSON."""
    return json.dumps({"type": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Command | Event:
    """Read one line.

    Raises:
        ValueError: Not a message of this protocol version.
    """
    try:
        values = json.loads(line)
        cls = _TYPES[values.pop("type")]
        known = {item.name for item in fields(cls)}
        message: Command | Event = cls(**{key: value for key, value in values.items() if key in known})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"not a message between kernel and launcher: {line[:200]!r}"
        raise ValueError(msg) from error
    return message
