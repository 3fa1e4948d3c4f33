"""How a run ended -> the values of its ranks, or the exception that the cell raises."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

from air_nb.errors import RankFailedError, RankFailure, RemoteError, RunError, RunStoppedError, RunTimeoutError
from air_nb.launch.ladder import LADDERS, StopKind
from air_nb.protocol.bundle import Bundle
from air_nb.protocol.messages import Done, RunState
from air_nb.protocol.names import ERROR
from air_nb.protocol.pickling import thaw
from air_nb.session.rank_names import format_ranks, name_ranks
from air_nb.session.stacks import describe_stacks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from air_nb.runs.directory import RunDirectory

__all__ = ["fail", "interruption", "load_values"]

_E = TypeVar("_E", bound=RunError)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def load_values(
    directory: RunDirectory, ranks: list[int], nproc: int, shipped: Mapping[str, object]
) -> list[dict[str, Any] | None]:
    """Values that ranks wrote, index = rank; None for ranks that are not in ``ranks``. The files are unlinked."""
    values: list[dict[str, Any] | None] = [None] * nproc
    for rank in ranks:
        path = directory.rank_file(rank, "result")
        values[rank] = thaw(Bundle.open(path), shipped=shipped) if path.exists() else {}
        path.unlink(missing_ok=True)
    return values


def fail(
    done: Done,
    directory: RunDirectory,
    nproc: int,
    results: list[Any],
    shipped: Mapping[str, object],
    *,
    interrupted: bool,
) -> BaseException:
    """The exception for a run that did not finish."""
    undead = (
        f" Process {', '.join(map(str, done.undead))} survived SIGKILL: it is stuck in a driver." if done.undead else ""
    )
    if interrupted and not done.failures:
        return interruption(f"all ranks were stopped.{undead}", _unresponsive(done.unresponsive, directory))
    if done.state == RunState.TIMED_OUT:
        stacks = describe_stacks(directory, range(nproc))
        message = f"the run was stopped at {done.reason}.{undead}"
        lines = (f"\x1b[31mRunTimeoutError\x1b[0m: {message}", *stacks)
        return _with_plain_note(RunTimeoutError(message, run_id=done.run_id, results=results, lines=lines))
    if done.state == RunState.KILLED:
        return RunStoppedError(f"the run was stopped: {done.reason}.{undead}", run_id=done.run_id, results=results)
    if not done.failures:
        return RunError(f"the run could not be carried out: {done.reason}", run_id=done.run_id, results=results)
    return _rank_failure(done, directory, nproc, results, shipped, undead)


def interruption(what: str, lines: Sequence[str] = ()) -> KeyboardInterrupt:
    """The KeyboardInterrupt of an interrupted cell: one line instead of frames of air_nb, and what else there is."""
    error = KeyboardInterrupt(what)
    shown = [f"\x1b[31mKeyboardInterrupt\x1b[0m: {what}", *lines]
    error._render_traceback_ = lambda: shown  # type: ignore[attr-defined]  # IPython's protocol
    return error


def _unresponsive(ranks: list[int], directory: RunDirectory) -> list[str]:
    """Where the ranks were that had to be stopped by SIGTERM or SIGKILL."""
    if not ranks:
        return []
    # One group is the usual case; its own line would only name the ranks again.
    lines = describe_stacks(directory, ranks)
    head = f"{name_ranks(ranks)} did not end within {LADDERS[StopKind.INTERRUPT][0]:g} s of SIGINT"
    return [f"{head}:", *lines[1:]] if lines[0] == f"{name_ranks(ranks)}:" else [f"{head}; they were here:", *lines]


def _rank_failure(
    done: Done, directory: RunDirectory, nproc: int, results: list[Any], shipped: Mapping[str, object], undead: str
) -> RankFailedError:
    failures = tuple(RankFailure(**values) for values in done.failures)
    cause = failures[0]
    attempt = f" (attempt {cause.attempt + 1})" if cause.attempt else ""
    what = f"{cause.type_name}: {cause.message}" if cause.type_name else cause.message
    message = f"rank {cause.rank} of {nproc}{attempt}: {what}"
    error = RankFailedError(
        message, run_id=done.run_id, failures=failures, results=results, lines=_draw(failures, done, nproc, undead)
    )
    error.__cause__ = _load_exception(directory.rank_file(cause.rank, "error"), cause, shipped)
    return _with_plain_note(error)


def _draw(failures: tuple[RankFailure, ...], done: Done, nproc: int, undead: str) -> tuple[str, ...]:
    """Cause first and whole; equal tracebacks folded; the others in one line."""
    cause, *rest = failures
    same = [failure for failure in rest if (failure.type_name, _ANSI.sub("", failure.traceback)) == _essence(cause)]
    ranks = format_ranks([cause.rank, *(failure.rank for failure in same)])
    attempt = f", attempt {cause.attempt + 1}" if cause.attempt else ""
    word = "ranks" if same else "rank"
    lines = [f"\x1b[31mRankFailedError\x1b[0m: {word} {ranks} of {nproc} failed{attempt}"]
    lines += cause.traceback.splitlines() or [f"rank {cause.rank} (pid {cause.pid}) {cause.message}"]
    if cause.type_name == "SystemExit":
        lines.append(f"rank {cause.rank} ended early: {cause.message}")
    lines += [
        f"rank {failure.rank} failed too: {failure.type_name or 'ended'}: {_first_line(failure.message)}"
        for failure in rest
        if failure not in same
    ]
    failed = {failure.rank for failure in failures}
    stopped = [rank for rank in range(nproc) if rank not in failed and rank not in done.finished]
    if stopped:
        verb = "was" if len(stopped) == 1 else "were"
        lines.append(f"{name_ranks(stopped)} {verb} stopped; rank {cause.rank} failed first")
    if cause.hint:
        lines.append(f"hint: {cause.hint}")
    if undead:
        lines.append(undead.strip())
    return tuple(lines)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _essence(failure: RankFailure) -> tuple[str, str]:
    return failure.type_name, _ANSI.sub("", failure.traceback)


def _load_exception(path: Path, cause: RankFailure, shipped: Mapping[str, object]) -> BaseException:
    """The rank's own exception, unless loading it would import modules here that the user has not."""
    try:
        loaded = thaw(Bundle.open(path), shipped=shipped, may_import=False)[ERROR]
    except Exception:  # noqa: BLE001 - the user's class may raise anything when it is rebuilt; its text is kept below
        loaded = None
    return loaded if isinstance(loaded, BaseException) else RemoteError(cause.type_name or "RankDied", cause.message)


def _with_plain_note(error: _E) -> _E:
    """Where no IPython draws the error, Python shows notes."""
    error.add_note(_ANSI.sub("", "\n".join(error._lines[1:])))  # noqa: SLF001 - of the same package
    return error
