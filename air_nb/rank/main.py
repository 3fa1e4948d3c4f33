"""Life of a rank, in the main thread of a process that was forked from the warm forkserver.

Order matters: the lifeline first, then the files, so that a rank that dies at any later point is neither left running
nor silent; the report last.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import inspect
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from air_nb.protocol.names import FUNCTION, RESULT
from air_nb.protocol.start import RankReport
from air_nb.protocol.task import RankTask
from air_nb.rank import environment, keyboard, stdio, warm, workers
from air_nb.rank.values import RankValues

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from air_nb.protocol.start import RankStart

__all__ = ["main"]

_DISMISSAL_S = 1.0
_TEXT_MAX = 100_000  # of a message or a traceback: they travel through pipes and into the record
_COLLECTIVE_MODULES = ("torch.distributed", "torch.nn.parallel", "torch.autograd")


def main(start: RankStart, report: Connection) -> int:
    """Run one rank.

    Args:
        start: What to run, and as whom.
        report: Takes one ``RankReport``.

    Returns:
        Exit code of the process.
    """
    environment.arm_lifeline()
    atexit._clear()  # noqa: SLF001 - what the forkserver's imports registered is not this rank's to run
    directory = Path(start.directory)
    values = RankValues(directory, start.rank)
    try:
        stdio.redirect_descriptors(directory, start.rank)
        events = stdio.EventLog(directory / f"rank_{start.rank}.events")
        stdio.replace_python_streams(events)
        environment.arm_signals(directory, start.rank)
        environment.adopt_environment(start)
        warm.shell.attach(events)
        ended = _run_task(start, values, events)
    except BaseException as error:  # noqa: BLE001 - the border of the rank: whatever it is, it is reported
        # Two ranks fail at once, and the stop that follows the first hits the second in the middle of its report.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ended = _describe(error)
        values.write_exception(error)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending: a Ctrl-C now would only tear its last words
    _flush()
    report.send_bytes(ended.encode())
    report.close()
    if not ended.ok and ended.type_name != "KeyboardInterrupt":
        _await_dismissal()
    atexit._run_exitfuncs()  # noqa: SLF001 - multiprocessing's children skip them; loggers and trackers rely on them
    _flush()
    return 0 if ended.ok else (ended.exit_code or 1)


def _await_dismissal() -> None:
    """Stay until the launcher stops the ranks (bounded).

    The end of this process closes its sockets, and each rank that waits for it in a collective would then fail too,
    with "Connection closed by peer", within the moment in which the launcher looks for other failures of the same
    cause.
    """
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        time.sleep(_DISMISSAL_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run_task(start: RankStart, values: RankValues, events: stdio.EventLog) -> RankReport:
    directory = Path(start.directory)
    task = RankTask.read(directory)
    environment.adopt_task(task)
    environment.adopt_matplotlib(task.matplotlib_backend)
    shell = warm.shell
    sys.modules["__main__"] = shell.user_module
    workers.install()
    keyboard.install()
    if task.import_hook is not None:
        module, _, function = task.import_hook.partition(":")
        getattr(importlib.import_module(module), function)(directory, start.rank)
    shell.compile.name_sources(task.sources, task.cell_numbers)
    shell.colors = task.colors
    names = values.read_payload(shell.user_ns)
    events.began()
    if task.kind == "cell":
        shell.user_ns.update(names)
        produced = _run_cell(task)
    else:
        produced = {RESULT: _call_function(task, names)}
    _destroy_process_group()
    values.write_values(produced)
    return RankReport(ok=True, at=time.time())


def _run_cell(task: RankTask) -> dict[str, Any]:
    """Run the cell as IPython would; returns the values asked for, by name."""
    shell = warm.shell
    shell.execution_count = task.execution_count
    shell.compile.header = task.header
    shell.displayhook.keep_only = task.out is not None
    shell.displayhook.source = shell.transform_cell(task.source)
    result = shell.run_cell(task.source, store_history=False)
    error = result.error_before_exec or result.error_in_exec
    if error is not None:
        raise error
    produced = {name: shell.user_ns[name] for name in task.pull if name in shell.user_ns}
    if task.out is not None:
        produced[RESULT] = shell.displayhook.value
    return produced


def _call_function(task: RankTask, names: dict[str, Any]) -> Any:
    function = names[FUNCTION].func
    result = function(
        *[names[name] for name in task.positional], **{key: names[name] for key, name in task.keywords.items()}
    )
    shell = warm.shell
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    shell.events.trigger("post_execute")  # inline figures are drawn there
    return result


def _destroy_process_group() -> None:
    """End the default process group, if the cell left one, so that NCCL and gloo close in order."""
    distributed = sys.modules["torch.distributed"]
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _describe(error: BaseException) -> RankReport:
    at = time.time()  # before the traceback is drawn, which takes a while: the earliest report is the cause
    kind = type(error)
    exit_code = None
    if isinstance(error, SystemExit):
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
        message = f"sys.exit({'' if error.code is None else repr(error.code)}) was called before the work was done"
    else:
        message = _text_of(error)
    well_known = kind.__module__ in {"builtins", "__main__"}
    name = kind.__qualname__ if well_known else f"{kind.__module__}.{kind.__qualname__}"
    return RankReport(
        ok=False,
        at=at,
        type_name=name,
        message=_shorten(message),
        traceback=_shorten(_format(error)),
        exit_code=exit_code,
        in_collective=_is_in_collective(error),
    )


def _shorten(text: str) -> str:
    if len(text) <= _TEXT_MAX:
        return text
    half = _TEXT_MAX // 2
    return f"{text[:half]}\n... {len(text) - _TEXT_MAX:,} characters left out ...\n{text[-half:]}"


def _is_in_collective(error: BaseException) -> bool:
    """Whether torch raised it while this rank took part in a process group."""
    distributed = sys.modules["torch.distributed"]
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return isinstance(error, RuntimeError) and str(module).startswith(_COLLECTIVE_MODULES)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - the user's own __str__ may raise
        return f"<str() of the exception raised {type(broken).__name__}>"


def _format(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        # Nearly always our own stop, whose traceback nobody sees; IPython would parse all of torch.distributed for it.
        return "".join(traceback.format_exception(error))
    try:
        return warm.shell.format_failure(error)
    except Exception as broken:  # noqa: BLE001 - a traceback that can't be drawn must not hide the failure
        return "".join(traceback.format_exception(error)) + f"(IPython could not format it: {broken!r})"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the cell, or a full disk
            stream.flush()
    stdio.flush_c_stdio()
