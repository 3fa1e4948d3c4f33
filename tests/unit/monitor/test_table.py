import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from air_nb.monitor.gpu_report import DriverState, GpuProcess, GpuReport, GpuSample, GpuState
from air_nb.monitor.holders import Holder, HolderKind
from air_nb.monitor.host import HostSample
from air_nb.monitor.table import gpu_table

GIB = 1 << 30
AT = datetime(2026, 11, 29, 16, 0, tzinfo=UTC)
BUSY = GpuSample(
    0,
    "GPU-0",
    "NVIDIA H100 80GB HBM3",
    utilization_percent=97,
    memory_used_bytes=61 * GIB,
    memory_total_bytes=80 * GIB,
    temperature_celsius=64,
    power_watts=612.4,
    power_limit_watts=700.0,
    mig=False,
    processes=(
        GpuProcess(4711, 60 * GIB, "python", "ann"),
        GpuProcess(9, None),
        GpuProcess(4712, GIB, "python", "ann"),
    ),
)
HOST = HostSample(AT, 12.5, 8, 3 * GIB, 16 * GIB, "/home/ann/air_nb", 100 * GIB, 400 * GIB)
REPORT = GpuReport(
    AT,
    DriverState.OK,
    None,
    "570.86.15",
    (
        BUSY,
        GpuSample(1, "GPU-1", "NVIDIA H100 80GB HBM3", mig=True),
        GpuSample(2, state=GpuState.LOST, reason="GPU is lost"),
    ),
)


def draw(report, labels=(), *, host=HOST, now=AT):
    held = [process for gpu in report.gpus for process in gpu.processes]
    known = dict(labels)
    holders = {p.pid: Holder(p.pid, HolderKind.STRANGER, known.get(p.pid, f"pid {p.pid} python")) for p in held}
    return gpu_table(report, holders, host, now=now).splitlines()


def held_by(gpu, labels=()):
    """The last column of a GPU's lines."""
    _, header, *lines = draw(replace(REPORT, gpus=(gpu,)), labels)
    return [line[header.index("held by") :] for line in lines]


def test_the_table_shows_each_gpu_and_who_holds_it():
    ranks = {4711: "rank 2 of swift-otter", 4712: "rank 2 of swift-otter", 9: "this kernel"}
    assert draw(REPORT, ranks) == [
        "3 GPUs, driver 570.86.15",
        "GPU  name                         util            memory   temp         power  held by",
        (
            "  0  NVIDIA H100 80GB HBM3        97 %  61.0 of 80.0 GiB  64 °C  612 of 700 W  "
            "rank 2 of swift-otter, 2 processes: 61.0 GiB"
        ),
        " " * 79 + "this kernel, pid 9",
        "  1  NVIDIA H100 80GB HBM3 (MIG)   n/a               n/a    n/a           n/a",
        "  2  unknown model                 n/a               n/a    n/a           n/a  lost (GPU is lost)",
    ]


def test_a_pid_is_told_once():
    gpu = replace(BUSY, processes=(GpuProcess(7, 2 * GIB), GpuProcess(8, GIB)))
    assert held_by(gpu, {8: "rank 0 of calm-owl"}) == ["pid 7 python: 2.0 GiB", "rank 0 of calm-owl, pid 8: 1.0 GiB"]


@pytest.mark.parametrize("count, shown, last", [(4, 4, "pid 3"), (5, 5, "pid 4"), (200, 5, "196 more: 196.0 GiB")])
def test_many_holders_do_not_flood_the_table(count, shown, last):
    lines = held_by(replace(BUSY, processes=tuple(GpuProcess(pid, GIB) for pid in range(count))))
    assert len(lines) == shown
    assert lines[-1].startswith(last)


def test_the_largest_holder_is_first_and_unknown_amounts_are_last():
    processes = (GpuProcess(1, 3 * GIB), GpuProcess(2, 2 * GIB), GpuProcess(3, 2 * GIB), GpuProcess(4, None))
    lines = held_by(replace(BUSY, processes=processes), {2: "this kernel", 3: "this kernel"})
    assert lines == ["this kernel, 2 processes: 4.0 GiB", "pid 1 python: 3.0 GiB", "pid 4 python"]


def test_heat_is_told_and_an_everyday_reason_for_a_low_clock_is_not():
    hot = replace(BUSY, processes=(), throttle_reasons=("power_cap", "hw_thermal"), clock_sm_mhz=1200)
    assert held_by(hot) == ["slowed by heat to 1200 MHz"]
    assert held_by(replace(hot, clock_sm_mhz=None)) == ["slowed by heat"]
    assert held_by(replace(hot, throttle_reasons=("idle", "power_cap"))) == [""]


def test_an_old_sample_says_how_old_it_is():
    old = replace(REPORT, driver_state=DriverState.TIMEOUT, reason="the NVIDIA driver did not answer within 2 s")
    first = draw(old, now=AT + timedelta(seconds=14))[0]
    assert first.endswith(". the NVIDIA driver did not answer within 2 s: these values are 14 s old")


@pytest.mark.parametrize(
    "state,reason,text",
    [
        (
            DriverState.NO_LIBRARY,
            "no driver is installed here",
            "No GPU: no driver is installed here. Ranks run on CPU.",
        ),
        (DriverState.OK, None, "No GPU: the NVIDIA driver is loaded and reports none. Ranks run on CPU."),
        (DriverState.TIMEOUT, "no answer", "GPUs unknown (timeout): no answer."),
    ],
)
def test_without_a_gpu_the_machine_is_shown_and_why(state, reason, text):
    first, cpu, *others = draw(GpuReport(AT, state, reason))
    assert first == text
    assert re.fullmatch(r"CPU     8 cores, load \d+\.\d over the last minute", cpu)
    assert others == [
        "memory  3.0 of 16.0 GiB in use, 13.0 GiB free",
        "disk    100.0 of 400.0 GiB in use, 300.0 GiB free (/home/ann/air_nb)",
    ]


def test_what_is_unknown_of_the_machine_is_not_zero():
    unknown = HostSample(AT, disk_path="/net/ann")
    lines = draw(GpuReport(AT, DriverState.OK), host=unknown)
    assert lines[1].startswith("CPU     n/a, load")
    assert lines[2:] == ["memory  n/a", "disk    n/a (/net/ann)"]
