"""Choosing GPUs through the real pynvml and a pretend driver; the ranks themselves stay on the CPU build of torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.nvml.fixtures import nvml_library  # noqa: F401 - a fixture
from tests.nvml.stub import FakeNvml
from tests.support.kernel import Kernel, running_kernel

SHOW = "import os\n(os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'], os.environ['AIR_NB_DEVICE'])"


@pytest.fixture(scope="module")
def machine(nvml_library, tmp_path_factory) -> FakeNvml:  # noqa: F811
    return FakeNvml(nvml_library, tmp_path_factory.mktemp("state") / "nvml.txt")


@pytest.fixture(scope="module")
def gpu_kernel(machine: FakeNvml, tmp_path_factory, test_environment) -> Iterator[Kernel]:
    """A kernel on a machine with 8 GPUs, of which 0, 1 and 2 are busy."""
    with running_kernel(tmp_path_factory.mktemp("gpus"), env=machine.environment) as kernel:
        yield kernel


@pytest.fixture(autouse=True)
def busy_machine(machine: FakeNvml) -> None:
    machine.describe(*(f"gpu {i} used 40000\ngpu {i} util 95\nproc {i} 1 40000" for i in range(3)))


def uuids(text: str) -> list[str]:
    return re.findall(r"GPU-[0-9a-f-]+", text.splitlines()[0])


def test_two_gpus_are_the_most_idle_ones_and_the_map_is_printed(gpu_kernel: Kernel, machine: FakeNvml):
    cell = gpu_kernel.ok(f"%%distributed --gpus 2 --out r\n{SHOW}")
    assert "rank 0 → GPU 3, rank 1 → GPU 4" in cell.text
    chosen = f"{machine.uuid(3)},{machine.uuid(4)}"
    assert gpu_kernel.value("r") == repr([("0", chosen, "cuda"), ("1", chosen, "cuda")])


def test_gpu_ids_are_taken_in_the_order_given(gpu_kernel: Kernel, machine: FakeNvml):
    gpu_kernel.ok(f"%%distributed --gpu-ids 5,3 --out r\n{SHOW}")
    assert uuids(gpu_kernel.value("r")) == [machine.uuid(5), machine.uuid(3)] * 2


def test_without_a_count_all_visible_gpus_are_taken(gpu_kernel: Kernel, machine: FakeNvml):
    gpu_kernel.ok("%env CUDA_VISIBLE_DEVICES=6,4")
    try:
        gpu_kernel.ok(f"%%distributed --out r\n{SHOW}")
        assert uuids(gpu_kernel.value("r")) == [machine.uuid(6), machine.uuid(4)] * 2
        gpu_kernel.ok(f"%%distributed --gpu-ids 1 --out r\n{SHOW}")
        assert uuids(gpu_kernel.value("r")) == [machine.uuid(4)]
    finally:
        gpu_kernel.ok("import os; del os.environ['CUDA_VISIBLE_DEVICES']")


@pytest.mark.parametrize(
    "options, parts",
    [
        ("--gpus 9", ["9", "8", "--device cpu"]),
        ("--gpus 1 --gpu-type A10", ["A10", "H100"]),
        ("--gpus 1 --gpu-type fast", ["fast"]),
        ("--nproc 9", ["--nproc 9", "--device cpu"]),
        ("--gpu-ids 8", ["8"]),
    ],
)
def test_what_is_not_there_is_a_one_line_usage_error(gpu_kernel: Kernel, options, parts):
    cell = gpu_kernel.run(f"%%distributed {options}\nprint('started')")
    assert cell.reply_status == "error"
    assert "UsageError" in cell.text
    assert "Traceback" not in cell.text
    assert "started" not in cell.text
    for part in parts:
        assert part in cell.text


def test_a_lost_gpu_is_left_out_and_named_when_it_is_needed(gpu_kernel: Kernel, machine: FakeNvml):
    machine.describe("gpu 3 error 15")
    gpu_kernel.ok(f"%%distributed --gpus 7 --out r\n{SHOW}")
    assert machine.uuid(3) not in gpu_kernel.value("r")
    cell = gpu_kernel.run("%%distributed --gpus 8\npass")
    assert cell.reply_status == "error"
    assert "lost" in cell.text


def test_two_kernels_never_take_the_same_gpu(gpu_kernel: Kernel, machine: FakeNvml, tmp_path):
    with running_kernel(tmp_path, env=machine.environment) as other:
        first = gpu_kernel.start("%%distributed --gpus 5\nimport time; print('up', flush=True); time.sleep(30)")
        gpu_kernel.follow(first, until=lambda cell: "up" in cell.text)
        second = other.run("%%distributed --gpus 4 --output none\npass")
        assert second.reply_status == "error"
        assert f"{gpu_kernel.pid}" in second.text  # who has them
        other.ok("%%distributed --gpus 3\npass")
        gpu_kernel.interrupt()
        gpu_kernel.follow(first)
        other.ok("%%distributed --gpus 8\npass")


def test_air_gpus_shows_which_rank_holds_what(gpu_kernel: Kernel, machine: FakeNvml, tmp_path):
    with running_kernel(tmp_path, env=machine.environment) as other:
        cell = gpu_kernel.start(
            "%%distributed --gpu-ids 4 --name holder\n"
            "import os, time\nprint('pid', os.getpid(), flush=True); time.sleep(30)"
        )
        gpu_kernel.follow(cell, until=lambda cell: re.search(r"pid \d+\n", cell.stream()) is not None)
        pid = re.search(r"pid (\d+)", cell.stream())
        assert pid is not None
        machine.describe(f"proc 4 {pid[1]} 1234")
        table = other.ok("%air gpus").text
        gpu_kernel.interrupt()
        gpu_kernel.follow(cell)
    assert "H100" in table
    assert re.search(r"rank 0 of holder \(another notebook\), pid \d+: 1\.2 GiB$", table, re.MULTILINE)


def test_what_a_rank_has_started_counts_as_the_rank(gpu_kernel: Kernel, machine: FakeNvml, tmp_path):
    with running_kernel(tmp_path, env=machine.environment) as other:
        cell = other.start(
            "%%distributed --gpu-ids 4,5 --name parent\n"
            "import os, subprocess\nchild = subprocess.Popen(['sleep', '30'])\n"
            "print('pids', os.getpid(), child.pid, flush=True); child.wait()"
        )
        other.follow(cell, until=lambda cell: re.search(r"pids \d+ \d+\n", cell.stream()) is not None)
        pids = re.search(r"pids (\d+) (\d+)", cell.stream())
        assert pids is not None
        machine.describe(f"proc 4 {pids[1]} 1024", f"proc 4 {pids[2]} 1024", f"proc 7 {other.pid} 1024")
        table = gpu_kernel.ok("%air gpus").text
        other.interrupt()
        other.follow(cell)
        own = other.ok("%air gpus").text
    assert "rank 0 of parent (another notebook), 2 processes: 2.0 GiB" in table
    assert re.search(rf"pid {other.pid} \S+ of \S+: 1\.0 GiB$", table, re.MULTILINE)
    assert f"this kernel, pid {other.pid}: 1.0 GiB" in own


def test_the_kernel_never_talks_to_the_driver_itself(gpu_kernel: Kernel):
    assert gpu_kernel.value("[m for m in ('torch', 'pynvml') if m in __import__('sys').modules]") == "[]"
    assert gpu_kernel.value("'nvidia-ml' in open('/proc/self/maps').read()") == "False"


def test_a_script_asks_the_driver_too(machine: FakeNvml, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nfrom air_nb import distributed\n"
        "@distributed(gpus=1, gpu_type='H100')\ndef train():\n    return os.environ['CUDA_VISIBLE_DEVICES']\n"
        "print(train.distributed())\n"
        "try:\n    train.with_overrides(gpu_type='A10').distributed()\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **machine.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert machine.uuid(3) in done.stdout
    assert "DeviceError" in done.stdout


def test_a_script_samples_all_gpus_with_one_call(machine: FakeNvml):
    machine.describe("count 2", "gpu 1 util 73")
    program = (
        "import sys, air_nb.monitor as monitor\nreport = monitor.sample()\n"
        "print(report.driver_state, [gpu.utilization_percent for gpu in report.gpus], 'pynvml' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **machine.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "ok [0, 73] False\n"
