"""The poller on the real sampler, the real pynvml and the stub library."""

import os
import threading
import time

import psutil
import pytest

from air_nb.monitor import Sampler
from air_nb.monitor.gpu_report import DriverState, GpuState
from air_nb.monitor.holders import HolderKind
from air_nb.monitor.poller import Poller
from air_nb.monitor.sampler import Sampler as RealSampler

LONG_S = 30.0


class Impatient(RealSampler):
    """Waits for the driver as long as a test wants to."""

    timeout_s = LONG_S

    def sample(self, timeout_s: float = 0.0):
        return super().sample(self.timeout_s)


@pytest.fixture
def sampler():
    with Impatient() as sampler:
        yield sampler


@pytest.fixture
def poller(sampler):
    poller = Poller(sampler, on_sample=lambda snapshot: None, interval_s=600.0)
    yield poller
    poller.stop()


def test_a_snapshot_has_gpus_the_machine_and_who_holds_what(fake_nvml, poller):
    fake_nvml.describe("count 16", "gpu 15 util 88", f"proc 15 {os.getpid()} 100")
    snapshot = poller.refresh(LONG_S)
    assert len(snapshot.report.gpus) == 16
    assert snapshot.report.gpus[15].utilization_percent == 88
    assert snapshot.holders[os.getpid()].kind is HolderKind.THIS_KERNEL
    assert snapshot.host.memory_total_bytes > 0
    assert len(poller.history.as_base64()["gpus"]) == 16


def test_a_hung_driver_call_freezes_neither_poller_nor_caller_and_polling_recovers(fake_nvml, sampler, poller):
    good = poller.refresh(LONG_S)
    fake_nvml.describe("gpu 3 hang 1")
    begun = threading.Event()
    fake_ask = sampler.sample

    def sample():
        begun.set()
        return fake_ask()

    sampler.sample = sample
    sampler.timeout_s = 1.0
    assert poller.refresh() is good  # it does not wait
    assert begun.wait(LONG_S)
    poller.tell("page", "active")
    assert poller.latest is good
    hung = poller.refresh(LONG_S)
    assert hung.report.driver_state is DriverState.TIMEOUT
    assert (hung.report.gpus, hung.report.at) == (good.report.gpus, good.report.at)
    assert hung.polled_at > good.polled_at
    fake_nvml.describe()
    sampler.timeout_s = LONG_S
    assert poller.refresh(LONG_S).report.driver_state is DriverState.OK


def test_a_call_that_hangs_and_then_returns_needs_no_new_process(fake_nvml, sampler, poller):
    poller.refresh(LONG_S)
    process = sampler._process.popen.pid
    fake_nvml.describe("gpu 3 hang 1")
    poller.refresh()
    fake_nvml.describe("gpu 3 temp 77")
    assert poller.refresh(LONG_S).report.gpus[3].temperature_celsius == 77
    assert sampler._process.popen.pid == process


def test_slow_calls_are_waited_for(fake_nvml, poller):
    fake_nvml.describe("count 2", "gpu 1 slow_ms 20", "gpu 1 temp 50")
    assert [gpu.temperature_celsius for gpu in poller.refresh(LONG_S).report.gpus] == [31, 50]


def test_a_gpu_that_gets_lost_and_comes_back_is_a_gap(fake_nvml, poller):
    states = []
    for statement in ("gpu 1 error 15", ""):
        poller.refresh(LONG_S)
        fake_nvml.describe(statement)
        states.append(poller.refresh(LONG_S).report.gpus[1].state)
    assert states == [GpuState.LOST, GpuState.OK]


def test_without_a_driver_the_machine_is_polled(fake_nvml, poller):
    fake_nvml.describe("init_error 9")
    snapshots = [poller.refresh(LONG_S) for _ in range(2)]
    assert [each.report.driver_state for each in snapshots] == [DriverState.NO_DRIVER] * 2
    assert snapshots[1].host.cpu_count > 0
    assert len(poller.history) == 2


def test_the_sampler_of_a_script_ends_its_process(fake_nvml):
    with Sampler() as sampler:
        sampler.sample(LONG_S)
        assert sampler._process is not None
        process = psutil.Process(sampler._process.popen.pid)
    end = time.monotonic() + LONG_S
    while process.is_running() and time.monotonic() < end:
        time.sleep(0.01)
    assert not process.is_running()
