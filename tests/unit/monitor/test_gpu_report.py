import json
from datetime import UTC, datetime, timedelta

from air_nb.monitor.gpu_report import DriverState, GpuProcess, GpuReport, GpuSample, GpuState

FULL = GpuReport(
    at=datetime(2026, 11, 29, 16, 0, tzinfo=UTC),
    driver_state=DriverState.TIMEOUT,
    reason="slow",
    driver_version="570.86.15",
    gpus=(
        GpuSample(
            index=0,
            uuid="GPU-1",
            name="NVIDIA H100",
            state=GpuState.LOST,
            reason="GPU is lost",
            utilization_percent=1,
            memory_used_bytes=2,
            memory_total_bytes=3,
            temperature_celsius=4,
            power_watts=5.5,
            power_limit_watts=6.5,
            clock_sm_mhz=1410,
            throttle_reasons=("power_cap", "hw_thermal"),
            mig=True,
            processes=(GpuProcess(1, 2, "python", "ann"), GpuProcess(3)),
        ),
        GpuSample(index=1),
    ),
)


def test_a_report_survives_json():
    assert GpuReport.from_json(json.loads(json.dumps(FULL.to_json()))) == FULL


def test_states_come_back_as_states_and_not_as_text():
    back = GpuReport.from_json(json.loads(json.dumps(FULL.to_json())))
    assert type(back.driver_state) is DriverState
    assert type(back.gpus[0].state) is GpuState


def test_age_counts_from_the_sample_and_not_from_the_question():
    assert FULL.age_s(FULL.at + timedelta(seconds=14)) == 14.0


def test_no_reason_to_throttle_is_not_an_unknown_one():
    gpus = (GpuSample(0, throttle_reasons=()), GpuSample(1, throttle_reasons=None))
    back = GpuReport.from_json(json.loads(json.dumps(GpuReport(FULL.at, DriverState.OK, gpus=gpus).to_json())))
    assert [gpu.throttle_reasons for gpu in back.gpus] == [(), None]
