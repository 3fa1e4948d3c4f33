"""How a run ended -> the values of its ranks, or the exception that the cell raises."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

from air_nb.errors import RankFailedError, RankFailure, RemoteError, RunError, RunStoppedError, RunTimeoutError
from air_nb.protocol.bundle import Bundle, BundleError
from air_nb.protocol.messages import Done, RunState
from air_nb.protocol.names import ERROR
from air_nb.protocol.pickling import thaw

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from air_nb.runs.directory import RunDirectory

__all__ = ["fail", "format_ranks", "load_values"]

_E = TypeVar("_E", bound=RunError)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NO_KEYBOARD_TYPES = ("EOFError", "StdinNotImplementedError", "IPython.core.error.StdinNotImplementedError")


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
    undead = f" Process {', '.join(map(str, done.undead))} survived SIGKILL: it is stuck in a driver." if done.undead else ""
    if interrupted and done.state == RunState.KILLED:
        return _interruption(undead)
    if done.state == RunState.TIMED_OUT:
        stacks = describe_stacks(directory, nproc)
        message = f"the run was stopped at {done.reason}.{undead}"
        lines = (f"\x1b[31mRunTimeoutError\x1b[0m: {message}", *stacks)
        return _with_plain_note(RunTimeoutError(message, run_id=done.run_id, results=results, lines=lines))
    if done.state == RunState.KILLED:
        return RunStoppedError(f"the run was stopped: {done.reason}.{undead}", run_id=done.run_id, results=results)
    if not done.failures:
        return RunError(f"the run could not be carried out: {done.reason}", run_id=done.run_id, results=results)
    return _rank_failure(done, directory, nproc, results, shipped, undead)


def _interruption(undead: str) -> KeyboardInterrupt:
    error = KeyboardInterrupt()
    line = f"\x1b[31mKeyboardInterrupt\x1b[0m: all ranks were stopped.{undead}"
    error._render_traceback_ = lambda: [line]  # type: ignore[attr-defined]  # IPython's protocol: no frames of air_nb
    return error


def _rank_failure(  # noqa: PLR0913, PLR0917 - the parts of one story
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
    lines += [
        f"rank {failure.rank} failed too: {failure.type_name or 'ended'}: {failure.message.splitlines()[0] if failure.message else ''}"
        for failure in rest
        if failure not in same
    ]
    failed = {failure.rank for failure in failures}
    stopped = [rank for rank in range(nproc) if rank not in failed and rank not in done.finished]
    if stopped:
        verb = "was" if len(stopped) == 1 else "were"
        lines.append(f"{_ranks_word(stopped)} {verb} stopped; rank {cause.rank} failed first")
    hint = _keyboard_hint(cause) or cause.hint
    if hint:
        lines.append(f"hint: {hint}")
    if undead:
        lines.append(undead.strip())
    return tuple(lines)


def _essence(failure: RankFailure) -> tuple[str, str]:
    return failure.type_name, _ANSI.sub("", failure.traceback)


def _keyboard_hint(failure: RankFailure) -> str | None:
    if failure.type_name in _NO_KEYBOARD_TYPES or "input" in failure.message and "StdinNotImplemented" in failure.type_name:
        return "ranks have no keyboard: train.func() runs it here, in the kernel"
    return None


def _load_exception(path: Path, cause: RankFailure, shipped: Mapping[str, object]) -> BaseException:
    """The rank's own exception, unless loading it would import modules here that the user has not."""
    try:
        bundle = Bundle.open(path)
        if all(name in sys.modules for name in modules_of(bundle)):
            loaded = thaw(bundle, shipped=shipped)[ERROR]
            if isinstance(loaded, BaseException):
                return loaded
    except (OSError, BundleError):
        pass
    except Exception:  # noqa: BLE001 - the user's class may raise anything when it is rebuilt; the text is kept below
        pass
    return RemoteError(cause.type_name or "RankDied", cause.message)


def modules_of(bundle: Bundle) -> set[str]:
    """Names of the modules that a pickle would import (from its opcodes, without loading it)."""
    import pickletools

    strings: list[str] = []
    modules = set()
    for opcode, argument, _ in pickletools.genops(b"".join(bytes(piece) for piece in bundle.stream)):
        if opcode.name == "GLOBAL" and isinstance(argument, str):
            modules.add(argument.split(" ")[0])
        elif "UNICODE" in opcode.name and isinstance(argument, str):
            strings.append(argument)
        elif opcode.name == "STACK_GLOBAL":
            modules.update(strings[-2:-1])
    return modules


def _with_plain_note(error: _E) -> _E:
    """Where no IPython draws the error, Python shows notes."""
    error.add_note(_ANSI.sub("", "\n".join(error._lines[1:])))  # noqa: SLF001 - of the same package
    return error


def describe_stacks(directory: RunDirectory, nproc: int) -> list[str]:
    """Where every rank was: its Python stacks, equal ones once."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in range(nproc):
        try:
            text = directory.rank_file(rank, "stacks").read_text(errors="replace")
        except FileNotFoundError:
            text = ""
        groups[_last_dump(text)].append(rank)
    lines = []
    for text, ranks in groups.items():
        lines.append(f"{_ranks_word(ranks)}:")
        lines += [f"  {line}" for line in text.splitlines()] or ["  no Python stack: the process did not answer"]
    return lines


def _last_dump(text: str) -> str:
    """The main thread's stack, without the thread's id, which differs from rank to rank."""
    blocks = [block for block in re.split(r"\n\n", text.strip()) if "air_nb-lifeline" not in block]
    mains = [block for block in blocks if block.startswith("Current thread")]
    block = mains[-1] if mains else (blocks[-1] if blocks else "")
    return re.sub(r"0x[0-9a-f]+", "", block)


def _ranks_word(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"


def format_ranks(ranks: list[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2, 5"``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
