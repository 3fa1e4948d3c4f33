"""The sampling process: answers each request line on stdin with one report line on stdout.

Started by `air_nb.monitor.sampler` with the kernel's pid and start time as arguments; dies with the kernel (see
`air_nb.runs.liveness`). A request is a number; the reply is a JSON object with that number and the report. Reply 0
comes unasked when the driver has been initialised, which can take seconds.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import TYPE_CHECKING, TextIO

from air_nb.monitor.gpu_report import DriverState, GpuReport, utc_now
from air_nb.runs.liveness import ProcessId, call_when_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["main"]


def main(parent_pid: int, parent_ticks: int) -> None:
    """Serve until stdin ends or the parent is gone.

    Args:
        parent_pid: Process id of the kernel.
        parent_ticks: Its start time, as of `air_nb.runs.liveness.ProcessId`.
    """
    kernel = ProcessId(parent_pid, parent_ticks)
    call_when_gone(kernel, sys.stdin.fileno(), lambda: os._exit(0), name="air_nb-sampler-lifeline")
    replies = _take_stdout()
    read = _reader()
    for number in itertools.chain([0], _requests()):
        replies.write(json.dumps({"number": number, "report": read().to_json()}) + "\n")
        replies.flush()


def _requests() -> Iterator[int]:
    while line := sys.stdin.buffer.readline():
        yield int(line)


def _take_stdout() -> TextIO:
    """Keep stdout for replies alone: what the driver's library prints goes to stderr and can't garble one."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _reader() -> Callable[[], GpuReport]:
    try:
        from air_nb.monitor.nvml import NvmlReader
    except ImportError as error:
        reason = f"the Python package nvidia-ml-py can't be imported ({error}); reinstall air_nb"
        return lambda: GpuReport(utc_now(), DriverState.NO_LIBRARY, reason)
    read = NvmlReader().read

    def report() -> GpuReport:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - the border: the kernel is told, the next sample is tried afresh
            return GpuReport(utc_now(), DriverState.ERROR, f"sampling failed: {type(error).__name__}: {error}")

    return report
