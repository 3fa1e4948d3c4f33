"""The text of ``%air gpus``: a line per GPU and who holds it; without a GPU, the machine and why there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from air_nb.monitor.sample import DriverState, GpuReport, GpuSample, GpuState
from air_nb.monitor.text import describe_memory, describe_process, gib, plural

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

__all__ = ["gpu_table"]

_HEADER = ("GPU", "name", "util", "memory", "temp", "power", "held by")
_RIGHT = frozenset({"GPU", "util", "memory", "temp", "power"})
_UNKNOWN = "n/a"


def gpu_table(report: GpuReport, runs: Mapping[int, str], *, now: datetime | None = None) -> str:
    """Draw a report.

    Args:
        report: What to draw.
        runs: Process ids of ranks and what to call them, such as "rank 2 of run swift-otter".
        now: The time that ages are counted to (UTC), by default this moment.

    Returns:
        Lines of text without a final newline.
    """
    if not report.gpus:
        return "\n".join([_why_no_gpu(report), *_machine_lines()])
    rows: list[tuple[str, ...]] = [_HEADER]
    for gpu in report.gpus:
        first, *others = _holders(gpu, runs) or [""]
        rows.append((*_cells(gpu), first))
        rows += [("",) * (len(_HEADER) - 1) + (other,) for other in others]
    return "\n".join([_headline(report, now), *_align(rows)])


def _headline(report: GpuReport, now: datetime | None) -> str:
    text = plural(len(report.gpus), "GPU")
    if report.driver_version is not None:
        text += f", driver {report.driver_version}"
    if report.driver_state is not DriverState.OK:
        text += f". {report.reason}: these values are {report.age_s(now):.0f} s old"
    return text


def _holders(gpu: GpuSample, runs: Mapping[int, str]) -> list[str]:
    state = [] if gpu.state is GpuState.OK else [f"{gpu.state} ({gpu.reason})"]
    return state + [describe_process(each, runs.get(each.pid)) for each in gpu.processes]


def _cells(gpu: GpuSample) -> tuple[str, ...]:
    name = gpu.name or "unknown model"
    limit = "" if gpu.power_limit_watts is None else f" of {gpu.power_limit_watts:.0f}"
    return (
        str(gpu.index),
        f"{name} (MIG)" if gpu.mig else name,
        _number(gpu.utilization_percent, " %"),
        describe_memory(gpu),
        _number(gpu.temperature_celsius, " °C"),
        _number(gpu.power_watts, f"{limit} W"),
    )


def _number(value: float | None, unit: str) -> str:
    return _UNKNOWN if value is None else f"{value:.0f}{unit}"


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return ["  ".join(map(_pad, row, widths, _HEADER)).rstrip() for row in rows]


def _pad(cell: str, width: int, column: str) -> str:
    return cell.rjust(width) if column in _RIGHT else cell.ljust(width)


def _why_no_gpu(report: GpuReport) -> str:
    if report.driver_state is DriverState.OK:
        return "No GPU: the NVIDIA driver is loaded and reports none. Ranks run on CPU."
    if report.driver_state in (DriverState.NO_LIBRARY, DriverState.NO_DRIVER):
        return f"No GPU: {report.reason}. Ranks run on CPU."
    return f"GPUs unknown ({report.driver_state}): {report.reason}."


def _machine_lines() -> list[str]:
    memory = psutil.virtual_memory()
    here = Path.cwd()
    disk = psutil.disk_usage(str(here))
    return [
        f"CPU     {plural(os.cpu_count() or 0, 'core')}, load {os.getloadavg()[0]:.1f} over the last minute",
        f"memory  {gib(memory.total - memory.available)} of {gib(memory.total)} GiB in use",
        f"disk    {gib(disk.used)} of {gib(disk.total)} GiB in use, {gib(disk.free)} GiB free ({here})",
    ]
