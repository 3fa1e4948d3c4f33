"""The text of ``%air gpus``: a line per GPU and who holds it; without a GPU, the machine and why there is none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from air_nb.monitor.gpu_report import DriverState, GpuReport, GpuSample, GpuState
from air_nb.monitor.text import describe_memory, gib, plural
from air_nb.monitor.throttle import describe_slowdown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from air_nb.monitor.gpu_report import GpuProcess
    from air_nb.monitor.holders import Holder
    from air_nb.monitor.host import HostSample

__all__ = ["gpu_table"]

_HEADER = ("GPU", "name", "util", "memory", "temp", "power", "held by")
_RIGHT = frozenset({"GPU", "util", "memory", "temp", "power"})
_UNKNOWN = "n/a"
_HOLDERS_SHOWN = 4


def gpu_table(
    report: GpuReport, holders: Mapping[int, Holder], host: HostSample, *, now: datetime | None = None
) -> str:
    """Draw a report.

    Args:
        report: What to draw.
        holders: Who its processes are, by pid.
        host: The machine, which is drawn where there is no GPU.
        now: The time that ages are counted to (UTC), by default this moment.

    Returns:
        Lines of text without a final newline.
    """
    if not report.gpus:
        return "\n".join([_why_no_gpu(report), *_machine_lines(host)])
    rows: list[tuple[str, ...]] = [_HEADER]
    for gpu in report.gpus:
        first, *others = [*_troubles(gpu), *_held_by(gpu.processes, holders)] or [""]
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


def _troubles(gpu: GpuSample) -> list[str]:
    if gpu.state is not GpuState.OK:
        return [f"{gpu.state} ({gpu.reason})"]
    slowdown = describe_slowdown(gpu.throttle_reasons)
    clock = "" if gpu.clock_sm_mhz is None else f" to {gpu.clock_sm_mhz} MHz"
    return [slowdown + clock] if slowdown else []


def _held_by(processes: tuple[GpuProcess, ...], holders: Mapping[int, Holder]) -> list[str]:
    """A line per holder, whose processes count together (a rank and its workers), the largest first."""
    groups: dict[str, list[GpuProcess]] = {}
    for process in processes:
        groups.setdefault(holders[process.pid].label, []).append(process)
    in_order = sorted(groups.items(), key=lambda group: -(_held(group[1]) or 0))
    shown = in_order if len(in_order) == _HOLDERS_SHOWN + 1 else in_order[:_HOLDERS_SHOWN]
    lines = [_holder_line(label, each) for label, each in shown]
    rest = in_order[len(shown) :]
    if rest:
        held = _held(process for _, each in rest for process in each)
        lines.append(f"{len(rest)} more{_gib(held)}")
    return lines


def _holder_line(label: str, processes: list[GpuProcess]) -> str:
    pid = f"pid {processes[0].pid}"
    if len(processes) > 1:
        label += f", {len(processes)} processes"
    elif not label.startswith(pid):
        label += f", {pid}"
    return label + _gib(_held(processes))


def _gib(held: int | None) -> str:
    return "" if held is None else f": {gib(held)} GiB"


def _held(processes: Iterable[GpuProcess]) -> int | None:
    known = [process.used_bytes for process in processes if process.used_bytes is not None]
    return sum(known) if known else None


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


def _machine_lines(host: HostSample) -> list[str]:
    cores = _UNKNOWN if host.cpu_count is None else plural(host.cpu_count, "core")
    disk = _use(host.disk_used_bytes, host.disk_total_bytes)
    return [
        f"CPU     {cores}, load {os.getloadavg()[0]:.1f} over the last minute",
        f"memory  {_use(host.memory_used_bytes, host.memory_total_bytes)}",
        f"disk    {disk} ({host.disk_path})",
    ]


def _use(used: int | None, total: int | None) -> str:
    if used is None or total is None:
        return _UNKNOWN
    return f"{gib(used)} of {gib(total)} GiB in use, {gib(total - used)} GiB free"
