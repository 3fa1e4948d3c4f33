"""What `%air doctor` finds, with the machine's answers replaced at the border where Python asks for them."""

from __future__ import annotations

import importlib.metadata
import resource
import shutil
from types import SimpleNamespace

import pytest

from air_nb.monitor.gpu_report import DriverState, GpuReport, GpuSample, GpuState, utc_now
from air_nb.session import doctor
from air_nb.session.doctor import Finding, doctor_text, findings

NO_GPU = GpuReport(utc_now(), DriverState.NO_LIBRARY, "libnvidia-ml.so.1 was not found")


def session(report: GpuReport = NO_GPU, launcher=None):
    return SimpleNamespace(sampler=SimpleNamespace(sample=lambda: report), launcher=launcher)


def found(what: str, **changed) -> Finding:
    return next(finding for finding in findings(session(**changed)) if finding.what == what)


def test_a_machine_without_a_gpu_is_all_right():
    assert found("GPUs").fix is None
    assert "CPU" in found("GPUs").value


def test_what_is_wrong_is_marked_counted_and_comes_with_its_cure(monkeypatch):
    plain = doctor_text(session())
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    text = doctor_text(session())
    assert text.count("LOOK  ") == plain.count("LOOK  ") + 2
    assert "LOOK  open files         256 (at most 1024)\n      → raise it before Jupyter starts: ulimit -n 1024" in text
    assert text.endswith(f"{text.count('LOOK  ')} things to look at, marked LOOK")


def test_shared_memory_that_is_too_small_for_loader_workers(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=64 << 20, free=60 << 20))
    assert "--shm-size" in (found("/dev/shm").fix or "")
    assert "AIR_NB_HOME" in (found("run directory").fix or "")


@pytest.mark.parametrize("version, fix", [("8.9.1", "pip install 'ipython>=9.0'"), ("9.0.0", None), ("9.0rc1", None)])
def test_versions_below_the_minimum(monkeypatch, version, fix):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert found("ipython").fix == fix


def test_what_is_not_installed_matters_only_if_it_is_needed(monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert found("jupyterlab").fix is None
    assert found("torch").fix == "pip install 'torch>=2.11'"


def test_a_driver_that_does_not_answer():
    report = GpuReport(utc_now(), DriverState.TIMEOUT, "no answer in 2 s")
    assert "no answer in 2 s" in (found("GPUs", report=report).fix or "")


def test_a_lost_gpu_and_a_torch_that_can_not_use_the_others(monkeypatch):
    gpus = (
        GpuSample(0, "GPU-0", "NVIDIA H100", GpuState.OK),
        GpuSample(1, "GPU-1", "NVIDIA H100", GpuState.LOST, "GPU is lost"),
    )
    report = GpuReport(utc_now(), DriverState.OK, None, "570.1", gpus)
    monkeypatch.setattr(doctor, "torch_facts", lambda: {"cuda": None})
    assert found("GPU 0", report=report).fix is None
    assert "GPU is lost" in (found("GPU 1", report=report).fix or "")
    assert "CUDA build" in (found("torch and GPUs", report=report).fix or "")


@pytest.mark.parametrize(
    "launcher, value, fix",
    [
        (None, "not started", None),
        (SimpleNamespace(is_alive=False, log_tail=lambda: "bad import"), "ended", "bad import"),
        (SimpleNamespace(is_alive=True, ready=None, pid=7), "warming up (pid 7)", None),
        (
            SimpleNamespace(is_alive=True, ready=SimpleNamespace(warm_s=2.0, problem="no torch"), pid=7),
            "warm",
            "no torch",
        ),
    ],
)
def test_states_of_the_launcher(launcher, value, fix):
    finding = found("launcher", launcher=launcher)
    assert value in finding.value
    assert (finding.fix is None) == (fix is None)
    assert fix is None or fix in (finding.fix or "")
