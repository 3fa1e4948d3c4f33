"""The real pynvml, in the real sampling process, against the stub library."""

import getpass
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from air_nb.monitor import sampler as sampler_module
from air_nb.monitor.gpu_report import DriverState, GpuProcess, GpuState
from air_nb.monitor.sampler import Sampler
from tests.nvml.stub import LIBRARY

ROOT = Path(__file__).parents[3]
LONG_S = 30.0  # where the test is not about the bound


@pytest.fixture
def sampler():
    sampler = Sampler()
    yield sampler
    sampler.close()


def pid_of(sampler):
    assert sampler._process is not None
    return sampler._process.popen.pid


def gone(pid):
    """Whether the process ends; a zombie has."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_every_field_of_a_gpu_comes_through(fake_nvml, sampler):
    fake_nvml.describe(
        "count 2",
        "gpu 1 name NVIDIA A100-SXM4-40GB",
        "gpu 1 util 97",
        "gpu 1 used 30000",
        "gpu 1 total 40960",
        "gpu 1 reserved 600",
        "gpu 1 temp 64",
        "gpu 1 power 312500",
        "gpu 1 limit 400000",
        "gpu 1 clock 1410",
        "gpu 1 throttle 68",
    )
    report = sampler.sample(LONG_S)
    assert (report.driver_state, report.reason, report.driver_version) == (DriverState.OK, None, "570.86.15")
    assert [gpu.index for gpu in report.gpus] == [0, 1]
    gpu = report.gpus[1]
    assert (gpu.uuid, gpu.name, gpu.state) == (fake_nvml.uuid(1), "NVIDIA A100-SXM4-40GB", GpuState.OK)
    assert (gpu.utilization_percent, gpu.temperature_celsius, gpu.mig) == (97, 64, False)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (30000 << 20, 40960 << 20)
    assert (gpu.power_watts, gpu.power_limit_watts) == (312.5, 400.0)
    assert (gpu.clock_sm_mhz, gpu.throttle_reasons) == (1410, ("power_cap", "hw_thermal"))
    assert report.gpus[0].throttle_reasons == ()


def test_a_driver_that_knows_the_throttle_reasons_by_their_first_name_only_is_understood(fake_nvml, sampler):
    fake_nvml.describe("gpu 0 throttle 128", "gpu 0 nosupport events")
    assert sampler.sample(LONG_S).gpus[0].throttle_reasons == ("power_brake",)


def test_two_hundred_processes_on_one_of_sixteen_gpus_come_through(fake_nvml, sampler):
    pids = range(4_000_000, 4_000_200)
    fake_nvml.describe("count 16", *(f"proc 15 {pid} {pid - 3_999_999}" for pid in pids))
    gpus = sampler.sample(LONG_S).gpus
    assert [gpu.index for gpu in gpus] == list(range(16))
    assert [process.pid for process in gpus[15].processes] == list(reversed(pids))


def test_processes_are_named_as_far_as_they_can_be_seen(fake_nvml, sampler):
    me = psutil.Process()
    stranger = 4_000_000  # above pid_max of a small machine, and no process of ours
    fake_nvml.describe(
        f"proc 3 {stranger} 100", f"proc 3 {me.pid} 3000", f"gproc 3 {me.pid} 3000", f"gproc 4 {me.pid} -1"
    )
    gpus = sampler.sample(LONG_S).gpus
    mine = GpuProcess(me.pid, 3000 << 20, me.name(), getpass.getuser())
    assert gpus[3].processes == (mine, GpuProcess(stranger, 100 << 20))
    assert gpus[4].processes == (GpuProcess(me.pid, None, me.name(), getpass.getuser()),)


def test_what_the_driver_does_not_tell_is_none_and_not_zero(fake_nvml, sampler):
    fake_nvml.describe(
        *(f"gpu 5 nosupport {field}" for field in ("util", "temp", "power", "procs", "mem", "mig", "clock", "throttle"))
    )
    gpu = sampler.sample(LONG_S).gpus[5]
    assert gpu.state is GpuState.OK
    told = (gpu.utilization_percent, gpu.memory_used_bytes, gpu.memory_total_bytes, gpu.temperature_celsius)
    told_too = (gpu.power_watts, gpu.power_limit_watts, gpu.mig, gpu.clock_sm_mhz, gpu.throttle_reasons)
    assert (*told, *told_too, gpu.processes) == (*(None,) * 9, ())


@pytest.mark.parametrize("statement", ["gpu 3 error 15", "gpu 3 late_error 15"])
def test_a_lost_gpu_is_a_state_of_its_own_and_the_others_go_on(fake_nvml, sampler, statement):
    before = sampler.sample(LONG_S)
    fake_nvml.describe(statement)
    report = sampler.sample(LONG_S)
    assert report.driver_state is DriverState.OK
    assert [gpu.state for gpu in report.gpus] == [GpuState.LOST if index == 3 else GpuState.OK for index in range(8)]
    lost = report.gpus[3]
    assert (lost.uuid, lost.name, lost.reason) == (before.gpus[3].uuid, before.gpus[3].name, "GPU is lost")
    assert (lost.memory_used_bytes, lost.utilization_percent) == (None, None)
    fake_nvml.describe()
    assert sampler.sample(LONG_S).gpus[3].state is GpuState.OK


def test_a_gpu_lost_from_the_start_has_no_uuid(fake_nvml, sampler):
    fake_nvml.describe("gpu 0 error 15", "gpu 1 error 16")
    lost, needs_reset, *_ = sampler.sample(LONG_S).gpus
    assert (lost.state, lost.uuid) == (GpuState.LOST, None)
    assert (needs_reset.state, needs_reset.reason) == (GpuState.ERROR, "GPU requires restart")


def test_mig_mode_is_seen(fake_nvml, sampler):
    fake_nvml.describe("gpu 2 mig 1")
    gpu = sampler.sample(LONG_S).gpus[2]
    assert (gpu.mig, gpu.utilization_percent) == (True, None)


def test_a_hung_driver_call_costs_the_bound_and_the_next_sample_starts_afresh(fake_nvml, sampler):
    good = sampler.sample(LONG_S)
    hung_pid = pid_of(sampler)
    fake_nvml.describe("gpu 2 slow_ms 3600000")
    report = sampler.sample(0.2)
    assert report.driver_state is DriverState.TIMEOUT
    assert "did not answer within 0.2 s" in report.reason
    assert (report.gpus, report.at) == (good.gpus, good.at)
    assert gone(hung_pid)
    fake_nvml.describe()
    assert sampler.sample(LONG_S).driver_state is DriverState.OK


def test_a_driver_that_is_slow_to_initialise_is_waited_for_over_several_samples(fake_nvml, sampler):
    fake_nvml.describe("init_slow_ms 700")
    sampler.start()
    started = pid_of(sampler)
    early = sampler.sample(0.05)
    assert (early.driver_state, early.gpus) == (DriverState.TIMEOUT, ())
    assert "still starting" in early.reason
    assert sampler.sample(LONG_S).driver_state is DriverState.OK
    assert pid_of(sampler) == started


def test_a_driver_that_never_initialises_is_given_up(fake_nvml, sampler, monkeypatch):
    monkeypatch.setattr(sampler_module, "_START_TIMEOUT_S", 0.0)
    fake_nvml.describe("init_slow_ms 3600000")
    sampler.start()
    started = pid_of(sampler)
    assert "did not answer" in sampler.sample(0.05).reason
    assert gone(started)


def test_no_more_processes_are_started_while_one_is_stuck_in_the_driver(fake_nvml, sampler):
    with subprocess.Popen(["sleep", "3600"]) as stuck:
        sampler._hung = stuck  # a process that survives its SIGKILL can't be made on purpose
        report = sampler.sample(LONG_S)
        assert (report.driver_state, sampler._process) == (DriverState.TIMEOUT, None)
        assert f"process {stuck.pid} is stuck" in report.reason
        sampler.start()
        assert sampler._process is None
        stuck.kill()
    assert sampler.sample(LONG_S).driver_state is DriverState.OK


def test_without_the_library_no_process_is_kept_and_none_is_started_again(sampler, tmp_path, monkeypatch):
    (tmp_path / LIBRARY).touch()  # no library: dlopen ends its search here, also on a machine that has a real one
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    report = sampler.sample(LONG_S)
    assert (report.driver_state, report.gpus) == (DriverState.NO_LIBRARY, ())
    assert "libnvidia-ml.so.1 was not found" in report.reason
    assert sampler._process is None
    sampler.start()
    again = sampler.sample(LONG_S)
    assert (again.driver_state, sampler._process) == (DriverState.NO_LIBRARY, None)
    assert again.at > report.at


def test_without_the_driver_that_is_the_state(fake_nvml, sampler):
    fake_nvml.describe("init_error 9")
    report = sampler.sample(LONG_S)
    assert (report.driver_state, report.reason) == (DriverState.NO_DRIVER, "the NVIDIA driver is not loaded")
    assert sampler._process is None


def test_a_driver_updated_under_the_running_one_keeps_the_last_good_sample(fake_nvml, sampler):
    fake_nvml.describe("init_error 18")
    assert "different versions" in sampler.sample(LONG_S).reason
    fake_nvml.describe()
    assert sampler.sample(LONG_S).driver_state is DriverState.OK


def test_a_driver_that_fails_as_a_whole_is_initialised_again(fake_nvml, sampler):
    good = sampler.sample(LONG_S)
    fake_nvml.describe("count_error 999")
    report = sampler.sample(LONG_S)
    assert (report.driver_state, report.reason) == (DriverState.ERROR, "NVML failed: Unknown Error")
    assert (report.gpus, report.at) == (good.gpus, good.at)
    fake_nvml.describe()
    assert sampler.sample(LONG_S).driver_state is DriverState.OK


def test_what_the_drivers_library_prints_does_not_garble_the_report(fake_nvml, sampler):
    fake_nvml.describe("say {this is no report")
    assert sampler.sample(LONG_S).driver_state is DriverState.OK


def test_a_killed_sampling_process_is_replaced_at_the_next_sample(fake_nvml, sampler):
    sampler.sample(LONG_S)
    first = pid_of(sampler)
    os.kill(first, signal.SIGKILL)
    assert gone(first)
    assert sampler.sample(LONG_S).driver_state is DriverState.OK
    assert pid_of(sampler) != first


def test_a_driver_library_that_crashes_is_an_error_with_its_last_words(fake_nvml, sampler):
    good = sampler.sample(LONG_S)
    fake_nvml.describe("nonsense")
    report = sampler.sample(LONG_S)
    assert (report.driver_state, report.gpus) == (DriverState.ERROR, good.gpus)
    assert "exit status -6" in report.reason
    assert "cannot read 'nonsense'" in report.reason


def test_threads_share_one_sampling_process(fake_nvml, sampler):
    reports = []
    threads = [threading.Thread(target=lambda: reports.append(sampler.sample(LONG_S))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.driver_state for report in reports] == [DriverState.OK] * 8
    assert len([child for child in psutil.Process().children() if child.pid == pid_of(sampler)]) == 1


def test_closing_ends_the_process_and_later_samples_say_so(fake_nvml, sampler):
    sampler.sample(LONG_S)
    pid = pid_of(sampler)
    descriptors = psutil.Process().num_fds()
    sampler.close()
    sampler.close()
    assert gone(pid)
    assert psutil.Process().num_fds() == descriptors - 3  # two pipe ends and stderr's file
    report = sampler.sample(LONG_S)
    assert (report.driver_state, report.reason) == (DriverState.ERROR, "the sampler was closed")


def test_the_process_leaves_jupyters_interrupts_and_the_notebooks_folder_alone(fake_nvml, sampler):
    sampler.sample(LONG_S)
    assert os.getpgid(pid_of(sampler)) != os.getpgrp()
    assert psutil.Process(pid_of(sampler)).cwd() == "/"


def test_a_module_beside_the_notebook_does_not_stand_in_for_the_standard_library(
    fake_nvml, sampler, tmp_path, monkeypatch
):
    (tmp_path / "json.py").write_text("raise SystemExit('the notebook folder was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert sampler.sample(LONG_S).driver_state is DriverState.OK


def start_parent(program):
    """A stand-in for the kernel; it prints one line of pids and waits."""
    program = f"import os, sys, time; sys.path.insert(0, {str(ROOT)!r})\n{program}\ntime.sleep(3600)"
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True)


SAMPLING = """
from air_nb.monitor.sampler import Sampler
sampler = Sampler()
sampler.sample(30)
process = sampler._process.popen
"""


def test_the_process_dies_with_a_killed_kernel_though_a_forked_child_holds_the_pipe(fake_nvml):
    fork = """
copy = os.dup(sampler._process._requests)  # unknown to the at-fork hook, so that the child keeps it
child = os.fork()
if child: print(process.pid, child, flush=True)
"""
    with start_parent(SAMPLING + fork) as parent:
        sampling, child = map(int, parent.stdout.readline().split())
        try:
            parent.kill()
            assert gone(sampling)
            assert psutil.Process(child).status() != psutil.STATUS_ZOMBIE
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_process_dies_with_a_killed_kernel_while_it_hangs_in_the_driver(fake_nvml):
    fake_nvml.describe("init_slow_ms 3600000")
    program = SAMPLING.replace("sample(30)", "sample(0.3)") + "print(process.pid, flush=True)"
    with start_parent(program) as parent:
        sampling = int(parent.stdout.readline())
        parent.kill()
        assert gone(sampling)


def test_the_process_ends_with_its_pipe_though_it_hangs_in_the_driver(fake_nvml, sampler):
    fake_nvml.describe("init_slow_ms 3600000")
    sampler.sample(0.3)
    process = sampler._process
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), process._requests)
    assert gone(process.popen.pid)


def test_a_forked_child_holds_no_pipe_and_can_close_the_sampler_without_harm(fake_nvml):
    fork = """
pipe = os.fstat(sampler._process._requests)
child = os.fork()
if not child:
    held = [os.fstat(int(fd)).st_ino for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    sampler.close()
    os._exit(pipe.st_ino in held)
assert os.waitpid(child, 0)[1] == 0
print(sampler.sample(30).driver_state, process.poll(), flush=True)
"""
    with start_parent(SAMPLING + fork) as parent:
        assert parent.stdout.readline().split() == ["ok", "None"]
        parent.kill()


def test_the_kernel_side_never_imports_pynvml_or_torch():
    modules = "choose, gpu_type, locks, poller, reserve, sample, sampler, table, visible"
    program = (
        f"import sys; from air_nb.monitor import {modules}; print(sorted({{'pynvml', 'torch'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
