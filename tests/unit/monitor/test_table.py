import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from air_nb.monitor.sample import DriverState, GpuProcess, GpuReport, GpuSample, GpuState
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
    processes=(GpuProcess(4711, 60 * GIB, "python", "ann"), GpuProcess(9, None)),
)
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


def test_the_table_shows_each_gpu_and_who_holds_it():
    assert gpu_table(REPORT, {4711: "rank 2 of run swift-otter"}) == "\n".join(
        [
            "3 GPUs, driver 570.86.15",
            "GPU  name                         util            memory   temp         power  held by",
            (
                "  0  NVIDIA H100 80GB HBM3        97 %  61.0 of 80.0 GiB  64 °C  612 of 700 W  "
                "pid 4711 (ann, python, rank 2 of run swift-otter) 60.0 GiB"
            ),
            " " * 79 + "pid 9",
            "  1  NVIDIA H100 80GB HBM3 (MIG)   n/a               n/a    n/a           n/a",
            "  2  unknown model                 n/a               n/a    n/a           n/a  lost (GPU is lost)",
        ]
    )


def test_an_old_sample_says_how_old_it_is():
    old = replace(REPORT, driver_state=DriverState.TIMEOUT, reason="the NVIDIA driver did not answer within 2 s")
    first = gpu_table(old, {}, now=AT + timedelta(seconds=14)).splitlines()[0]
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
    first, *others = gpu_table(GpuReport(AT, state, reason), {}).splitlines()
    assert first == text
    shown = "\n".join(others)
    number = r"\d+\.\d"
    assert re.search(rf"^CPU     \d+ cores?, load {number} over the last minute$", shown, re.MULTILINE)
    assert re.search(rf"^memory  {number} of {number} GiB in use$", shown, re.MULTILINE)
    assert re.search(rf"^disk    {number} of {number} GiB in use, {number} GiB free \(/.*\)$", shown, re.MULTILINE)
