"""Every exception that air_nb raises.

::

    AirNbError                   base: catch this to catch all of them
    ├── DeviceError              the GPUs asked for are not there, not free or not of that type
    ├── CaptureError             names of the cell that can't be sent to the ranks
    ├── LauncherError            the launcher could not be started, or it died
    ├── NestedLaunchError        a launch inside a rank
    ├── NotDistributedError      a distributed function was called like a plain one
    ├── PagesError               MLflow's pages can't be shown
    ├── DataError                files, cache or position of a dataset
    │   └── ManifestChangedError the files are not those of the position that is to be restored
    ├── CheckpointError          a checkpoint could not be saved or restored
    │   ├── CheckpointNotFoundError  there is none to resume from
    │   ├── CheckpointDamagedError   bytes are missing, or not those that were written
    │   └── CheckpointMismatchError  it is of another model, or of a newer version of air_nb
    └── RunError                 a run that did not end well
        ├── RankFailedError      a rank failed; shows that rank's own traceback
        ├── RunTimeoutError      the run was stopped at its time limit
        └── RunStoppedError      the run was stopped from elsewhere (``%air stop``)
    RemoteError                  stands in for an exception that can't be re-created here

This module imports nothing of ours; every exception pickles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = [
    "AirNbError",
    "CaptureError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "DataError",
    "DeviceError",
    "LauncherError",
    "ManifestChangedError",
    "NestedLaunchError",
    "NotDistributedError",
    "PagesError",
    "RankFailedError",
    "RankFailure",
    "RemoteError",
    "RunError",
    "RunStoppedError",
    "RunTimeoutError",
    "Uncapturable",
]


class AirNbError(Exception):
    """Base of the exceptions of air_nb."""


class DeviceError(AirNbError):
    """The devices asked for are not there, are taken, or are of another type."""


class PagesError(AirNbError):
    """MLflow's pages can't be shown."""


class DataError(AirNbError):
    """Files, cache or position of a dataset."""


class ManifestChangedError(DataError):
    """The files are not those of the position that is to be restored."""


class CheckpointError(AirNbError):
    """A checkpoint could not be saved or restored."""


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint to resume from."""


class CheckpointDamagedError(CheckpointError):
    """Bytes of a checkpoint are missing, or are not those that were written."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is of another model, or of a newer version of air_nb."""


@dataclass(frozen=True, slots=True)
class Uncapturable:
    """One name that can't travel to the ranks."""

    name: str
    type_name: str
    reason: str
    advice: str

    def __str__(self) -> str:
        return f"`{self.name}` ({self.type_name}) can't be sent to the ranks: {self.reason}. {self.advice}"


class CaptureError(AirNbError):
    """Names that the cell reads can't be sent to the ranks; nothing was started.

    Attributes:
        problems: One entry per name, all of them.
    """

    def __init__(self, problems: tuple[Uncapturable, ...]) -> None:
        self.problems = problems
        super().__init__(problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of the frames of air_nb: the names tell which line is meant."""
        return [f"\x1b[31m{type(self).__name__}\x1b[0m: nothing was started", *map(str, self.problems)]


class LauncherError(AirNbError):
    """No rank can be started, or the launcher process died; the message says why and what to do."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of the frames of air_nb."""
        return f"\x1b[31m{type(self).__name__}\x1b[0m: {self}".splitlines()


class NestedLaunchError(AirNbError):
    """A launch was asked for inside a rank, which already is one process of a distributed run."""


class NotDistributedError(AirNbError, TypeError):
    """A distributed function was called like a plain one."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank failed, as recorded on that rank or, for a death, by the launcher.

    Attributes:
        rank: Global rank.
        attempt: 0 for the first start, then one more for each restart.
        pid: Process id of the rank; None if it never started.
        exit_code: Exit code of the process, None for a signal or while it was still alive.
        signal: Name of the signal that ended it (``"SIGKILL"``), else None.
        type_name: Qualified name of the exception, ``"SystemExit"`` for an exit, ``""`` for a death.
        message: Text of the exception, or what happened.
        traceback: The rank's own formatted traceback with the lines of the cell (ANSI colours), ``""`` for a death.
        at: Time of the failure, UTC seconds since the epoch.
        hint: What usually helps, if we know.
    """

    rank: int
    attempt: int
    pid: int | None
    exit_code: int | None
    signal: str | None
    type_name: str
    message: str
    traceback: str
    at: float
    hint: str | None = None


class RunError(AirNbError):
    """A run that did not end well.

    Attributes:
        run_id: Id of the run; its directory is listed by ``%air runs``.
        failures: One entry per failed rank, the cause first.
        results: Index = rank; the values of ranks that had finished, else None.
    """

    def __init__(
        self,
        message: str,
        *,
        run_id: str = "",
        failures: tuple[RankFailure, ...] = (),
        results: list[Any] | None = None,
        lines: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.run_id = run_id
        self.failures = failures
        self.results: list[Any] = results if results is not None else []
        self._lines = lines

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_run_error, (type(self), self.message, self.run_id, self.failures, self.results, self._lines)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of the frames of air_nb (IPython's own protocol)."""
        return list(self._lines) or [f"{type(self).__name__}: {self.message}"]


def _rebuild_run_error(
    cls: type[RunError],
    message: str,
    run_id: str,
    failures: tuple[RankFailure, ...],
    results: list[Any],
    lines: tuple[str, ...],
) -> RunError:
    return cls(message, run_id=run_id, failures=failures, results=results, lines=lines)


class RankFailedError(RunError):
    """A rank failed; ``failures[0]`` is the cause, ``__cause__`` its exception."""


class RunTimeoutError(RunError, TimeoutError):
    """The run was stopped at its time limit; the message says where each rank was."""


class RunStoppedError(RunError):
    """The run was stopped from outside the cell."""


class RemoteError(Exception):
    """An exception of a rank whose class can't be re-created in this process.

    Attributes:
        type_name: Qualified name of its class on the rank.
        message: Its text.
    """

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(type_name, message)
        self.type_name = type_name
        self.message = message

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"
