from datetime import UTC, datetime

import pytest

from air_nb.monitor.gpu_report import DriverState, GpuReport, GpuSample, GpuState
from air_nb.monitor.visible import visible_gpus

UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44")
REPORT = GpuReport(
    datetime(2026, 1, 1, tzinfo=UTC), DriverState.OK, gpus=tuple(GpuSample(i, uuid) for i, uuid in enumerate(UUIDS))
)


@pytest.mark.parametrize(
    "visible,indices",
    [
        (None, [0, 1, 2, 3]),
        ("0,1,2,3", [0, 1, 2, 3]),
        ("3,1", [3, 1]),
        (" 3 , 1 ", [3, 1]),
        ("", []),
        ("-1", []),
        ("1,-1,2", [1]),
        ("1,9,2", [1]),
        ("1,,2", [1]),
        ("none", []),
        ("NoDevFiles", []),
        ("1,1", []),
        ("1,GPU-aa22", []),
        ("GPU-bb33,0", [2, 0]),
        ("GPU-BB,GPU-c", [2, 3]),
        ("GPU-aa", []),
        ("0,GPU-aa,2", [0]),
        ("GPU-dd", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible, indices):
    assert [gpu.index for gpu in visible_gpus(REPORT, visible)] == indices


def test_a_lost_gpu_named_by_number_keeps_its_place():
    gpus = (GpuSample(0, state=GpuState.LOST), GpuSample(1, "GPU-aa22"))
    report = GpuReport(REPORT.at, DriverState.OK, gpus=gpus)
    assert [gpu.index for gpu in visible_gpus(report, "1,0")] == [1, 0]
    assert [gpu.index for gpu in visible_gpus(report, None)] == [0, 1]


def test_mig_devices_are_used_as_they_are_named():
    gpus = (GpuSample(0, "GPU-aa11", "NVIDIA A100", mig=True),)
    report = GpuReport(REPORT.at, DriverState.OK, gpus=gpus)
    (device,) = visible_gpus(report, "MIG-1234")
    assert (device.uuid, device.name, device.mig) == ("MIG-1234", "NVIDIA A100", True)
    assert device.memory_used_bytes is None
    assert len(visible_gpus(report, "MIG-1,MIG-2")) == 2
    assert visible_gpus(report, "MIG-1,MIG-1") == ()
