import os
import time
from datetime import UTC, datetime

import psutil
import pytest

from air_nb.monitor import host as host_module
from air_nb.monitor.cgroup import MemoryLimit
from air_nb.monitor.host import HostSampler

GIB = 1 << 30


class Limits:
    def __init__(self, memory=None, cpus=None, used_s=0.0):
        self._memory, self._cpus, self.used_s = memory, cpus, used_s

    def memory(self):
        return self._memory

    def cpus(self):
        return self._cpus

    def cpu_used_s(self):
        return None if self._cpus is None else self.used_s


@pytest.fixture
def sampler(monkeypatch):
    """A sampler on a machine without a container."""
    sampler = HostSampler()
    monkeypatch.setattr(sampler, "_limits", Limits())
    return sampler


def test_the_machine_and_its_cpus_are_seen_at_once(sampler, tmp_path, monkeypatch):
    monkeypatch.setenv("AIR_NB_HOME", str(tmp_path / "not" / "made"))
    before = datetime.now(UTC)
    first = sampler.sample()
    assert before <= first.at <= datetime.now(UTC)
    assert 0 <= first.cpu_percent <= 100
    assert first.cpu_count == len(os.sched_getaffinity(0))
    assert 0 < first.memory_used_bytes < first.memory_total_bytes == psutil.virtual_memory().total
    assert first.disk_path == str(tmp_path)
    assert 0 < first.disk_used_bytes < first.disk_total_bytes == psutil.disk_usage(str(tmp_path)).total
    total = sum(os.times()[:2])
    while sum(os.times()[:2]) < total + 0.05:  # the clock of the CPUs ticks every 10 ms
        pass
    assert 0 < sampler.sample().cpu_percent <= 100


def test_a_sample_in_the_same_tick_of_the_cpus_does_not_divide_by_nothing(sampler, monkeypatch):
    times = psutil.cpu_times(percpu=True)
    monkeypatch.setattr(psutil, "cpu_times", lambda *, percpu: times)
    assert [sampler.sample().cpu_percent for _ in range(2)] == [None, None]


def test_waiting_for_a_disk_is_not_work_and_cpus_of_others_do_not_count(sampler, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1})
    zero = dict.fromkeys(psutil.cpu_times()._fields, 0.0)
    one = type(psutil.cpu_times())
    clocks = iter(
        [
            [one(**zero), one(**zero)],
            [
                one(**{**zero, "user": 100.0}),
                one(**{**zero, "user": 20.0, "guest": 10.0, "iowait": 50.0, "idle": 30.0}),
            ],
        ]
    )
    monkeypatch.setattr(psutil, "cpu_times", lambda *, percpu: next(clocks))
    sample = sampler.sample()  # which looks twice, being the first
    assert sample.cpu_count == 1
    assert sample.cpu_percent == pytest.approx(20)


def test_a_container_has_its_limits_and_what_it_uses_of_them(monkeypatch):
    sampler = HostSampler()
    limits = Limits(MemoryLimit(2, 3), cpus=1.5)
    now = 100.0
    monkeypatch.setattr(sampler, "_limits", limits)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sampler.sample()
    limits.used_s, now = 7.5, 110.0
    sample = sampler.sample()
    assert (sample.memory_used_bytes, sample.memory_total_bytes, sample.cpu_count) == (2, 3, 2)
    assert sample.cpu_percent == pytest.approx(50)


def test_a_limit_above_what_the_machine_has_is_none(sampler, monkeypatch):
    monkeypatch.setattr(sampler, "_limits", Limits(MemoryLimit(2, 1 << 60)))
    assert sampler.sample().memory_total_bytes == psutil.virtual_memory().total


def test_a_network_disk_is_never_asked(sampler, monkeypatch, tmp_path):
    monkeypatch.setenv("AIR_NB_HOME", str(tmp_path))
    monkeypatch.setattr(host_module, "is_network_path", lambda path: True)
    monkeypatch.setattr(psutil, "disk_usage", lambda path: pytest.fail("a server that has gone never answers"))
    sample = sampler.sample()
    assert (sample.disk_path, sample.disk_used_bytes, sample.disk_total_bytes) == (str(tmp_path), None, None)


def test_a_disk_that_went_away_is_unknown(sampler, monkeypatch, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("AIR_NB_HOME", str(home))
    assert sampler.sample().disk_total_bytes is not None
    home.rmdir()
    assert sampler.sample().disk_total_bytes is None
