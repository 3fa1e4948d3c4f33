"""Life of a rank, in the main thread of a process that was forked from the warm forkserver.

Order matters: the lifeline first, then the files, so that a rank that dies at any later point is neither left running nor
silent; the report last.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from air_nb.protocol.names import FUNCTION, RESULT
from air_nb.protocol.start import RankReport
from air_nb.protocol.task import RankTask
from air_nb.rank import environment, stdio, warm, workers
from air_nb.rank.values import RankValues

if TYPE_CHECKING:
    import types
    from multiprocessing.connection import Connection

    from air_nb.protocol.start import RankStart

__all__ = ["main"]


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
    stdio.redirect_descriptors(directory, start.rank)
    events = stdio.EventLog(directory / f"rank_{start.rank}.events")
    stdio.replace_python_streams(events)
    values = RankValues(directory, start.rank)
    try:
        environment.arm_signals(directory, start.rank)
        environment.adopt_environment(start)
        warm.shell.attach(events)
        ended = _run_task(directory, values)
    except BaseException as error:  # noqa: BLE001 - the border of the rank: whatever it is, it is reported
        ended = _describe(error)
        values.write_exception(error)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending: a Ctrl-C now would only tear its last words
    _flush()
    report.send_bytes(ended.encode())
    report.close()
    atexit._run_exitfuncs()  # noqa: SLF001 - multiprocessing's children skip them; loggers and trackers rely on them
    _flush()
    return 0 if ended.ok else (ended.exit_code or 1)


def _run_task(directory: Path, values: RankValues) -> RankReport:
    task = RankTask.read(directory)
    environment.adopt_task(task)
    environment.adopt_matplotlib(task.matplotlib_backend)
    shell = warm.shell
    sys.modules["__main__"] = shell.user_module
    workers.install()
    shell.compile.name_sources(task.sources, task.cell_numbers)
    shell.colors = task.colors
    names = values.read_payload(shell.user_ns)
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
    kind = type(error)
    exit_code = None
    if isinstance(error, SystemExit):
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
        message = f"sys.exit({'' if error.code is None else repr(error.code)}) was called before the work was done"
    else:
        message = _text_of(error)
    name = kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    return RankReport(
        ok=False, at=time.time(), type_name=name, message=message, traceback=_format(error), exit_code=exit_code
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - the user's own __str__ may raise
        return f"<str() of the exception raised {type(broken).__name__}>"


def _format(error: BaseException) -> str:
    try:
        return warm.shell.format_failure(error, _is_ours)
    except Exception as broken:  # noqa: BLE001 - a traceback that can't be drawn must not hide the failure
        import traceback

        return "".join(traceback.format_exception(error)) + f"(IPython could not format it: {broken!r})"


def _is_ours(trace: types.TracebackType) -> bool:
    """Frames of air_nb and IPython above the user's own."""
    module = trace.tb_frame.f_globals.get("__name__", "")
    return module.split(".")[0] in ("air_nb", "IPython")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the cell, or a full disk
            stream.flush()
    stdio.flush_c_stdio()
