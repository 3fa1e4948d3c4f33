"""What a rank finds: torchrun's variables, ``air_nb.runtime``, process groups, threads, seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_TORCHRUNS = (
    "RANK",
    "LOCAL_",
    "NODE_RANK",
    "GROUP_",
    "ROLE_",
    "WORLD_",
    "MASTER_",
    "TORCHELASTIC_",
    "OMP_",
    "TORCH_NCCL_",
)
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
_READ_BY_THE_AGENT_ONLY = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}


def test_the_variables_of_torchrun_are_complete(on_ranks):
    program = "import json, os; print(json.dumps(dict(os.environ)) + '\\n', end='')"
    torchrun = subprocess.run(
        [*_TORCHRUN, "--no-python", sys.executable, "-c", program],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    theirs = sorted(map(json.loads, torchrun.stdout.splitlines()), key=lambda values: values["RANK"])

    ours = on_ranks("import os\ndict(os.environ)", "--nproc 2")

    for mine, reference in zip(ours, theirs, strict=True):
        names = {name for name in reference if name.startswith(_TORCHRUNS)} - _READ_BY_THE_AGENT_ONLY
        assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} <= names
        assert names <= set(mine)
        numbers = {name for name in names if name.endswith(("RANK", "WORLD_SIZE", "RESTARTS", "RESTART_COUNT"))}
        assert {name: mine[name] for name in numbers} == {name: reference[name] for name in numbers}
        assert (mine["MASTER_ADDR"], mine["TORCHELASTIC_USE_AGENT_STORE"], mine["NODE_RANK"]) == (
            "127.0.0.1",
            "True",
            "0",
        )


def test_runtime_tells_who_a_rank_is(on_ranks):
    values = on_ranks(
        "from air_nb import runtime\nruntime.get_rank(), runtime.get_local_rank(), runtime.get_world_size(),"
        " runtime.get_local_world_size(), runtime.get_node_rank(), str(runtime.device())",
        "--nproc 2",
    )

    assert values == [(0, 0, 2, 2, 0, "cpu"), (1, 1, 2, 2, 0, "cpu")]


def test_init_process_group_of_runtime_joins_all_ranks(on_ranks):
    cell = (
        "import torch, torch.distributed as dist\nfrom air_nb import runtime\nassert not dist.is_initialized()\n"
        "device = runtime.init_process_group()\nassert runtime.init_process_group() == device\n"
        "total = torch.tensor(float(runtime.get_rank() + 1))\ndist.all_reduce(total)\n"
        "total.item(), str(device), dist.get_backend()"
    )

    assert on_ranks(cell, "--nproc 3") == [(6.0, "cpu", "gloo")] * 3
    assert on_ranks(cell, "--nproc 3") == [(6.0, "cpu", "gloo")] * 3


def test_a_process_group_that_the_cell_leaves_is_destroyed_at_its_end(kernel):
    cell = kernel.ok(
        "%%distributed --nproc 2 --quiet\nimport atexit, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "atexit.register(lambda: print('left open:', dist.is_initialized()));"
    )

    assert cell.text == "[0-1] left open: False\n"


@pytest.mark.parametrize(
    "method", ["init_process_group('gloo')", "init_process_group()", "init_device_mesh('cpu', (2,))"]
)
def test_torchs_own_ways_to_join_work(on_ranks, method):
    module = "dist.device_mesh" if "mesh" in method else "dist"
    cell = (
        f"import torch.distributed as dist, torch.distributed.device_mesh\n{module}.{method}\n"
        "dist.barrier()\ndist.get_world_size()"
    )

    assert on_ranks(cell, "--nproc 2") == [2, 2]


def test_one_rank_can_have_a_process_group_too(on_ranks):
    assert on_ranks("import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.get_world_size()") == [1]


def test_a_process_group_listens_on_loopback_only(on_ranks):
    cell = (
        "import os, psutil, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "chain = [psutil.Process(), *psutil.Process().parents()[:2]]\n"
        "listening = {c.laddr.ip for p in chain for c in p.net_connections('inet') if c.status == 'LISTEN'}\n"
        "dist.barrier()\nsorted(listening)"
    )

    assert on_ranks(cell, "--nproc 2") == [["127.0.0.1"], ["127.0.0.1"]]


def test_run_id_and_checkpoint_root(kernel, on_ranks):
    cell = "from air_nb import runtime\nruntime.run_id(), str(runtime.checkpoint_root())"

    run_id, root = on_ranks(cell, "--nproc 1 --name experiment-7")[0]

    assert root == str(kernel.cwd / "checkpoints" / "experiment-7")
    assert run_id in kernel.ok("%air runs").text
    assert on_ranks(cell, "--nproc 1 --env AIR_NB_CHECKPOINT_ROOT=/somewhere/else")[0][1] == "/somewhere/else"


def test_outside_a_run_runtime_is_a_world_of_one(kernel):
    kernel.ok("from air_nb import runtime")

    assert kernel.value("(runtime.get_rank(), runtime.get_world_size(), runtime.run_id())") == "(0, 1, None)"
    assert (
        "init_process_group() needs the variables that torchrun" in kernel.run("runtime.init_process_group()").traceback
    )


def test_threads_share_the_cores_and_libraries_obey(on_ranks):
    cores = len(os.sched_getaffinity(0))
    cell = (
        "import os, torch, numpy, threadpoolctl\ntorch.get_num_threads(), os.environ['OMP_NUM_THREADS'],"
        " max(pool['num_threads'] for pool in threadpoolctl.threadpool_info())"
    )

    for nproc in (1, 2, cores + 1):
        count = max(1, cores // nproc)
        assert on_ranks(cell, f"--nproc {nproc}") == [(count, str(count), count)] * nproc


def test_omp_num_threads_for_the_run_is_obeyed(on_ranks):
    cell = "import os, torch\ntorch.get_num_threads(), os.environ['OMP_NUM_THREADS']"

    assert on_ranks(cell, "--nproc 2 --env OMP_NUM_THREADS=3") == [(3, "3")] * 2


def test_random_numpy_and_torch_differ_from_rank_to_rank_and_from_cell_to_cell(on_ranks):
    cell = "import random, numpy, torch\nrandom.random(), numpy.random.rand(), torch.rand(()).item()"

    draws = on_ranks(cell, "--nproc 2") + on_ranks(cell, "--nproc 2")

    for generator in zip(*draws, strict=True):
        assert len(set(generator)) == 4


def test_a_seed_that_the_cell_sets_is_its_own(on_ranks):
    cell = "import torch\n_ = torch.manual_seed(3)\ntorch.rand(()).item()"

    assert len(set(on_ranks(cell, "--nproc 2") + on_ranks(cell, "--nproc 2"))) == 1


def test_signal_handlers_of_a_rank_are_pythons_defaults(on_ranks):
    cell = (
        "import signal\n[signal.getsignal(n) is signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1,"
        " signal.SIGUSR2, signal.SIGCHLD)], signal.getsignal(signal.SIGINT) is signal.default_int_handler,"
        " len(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )

    assert on_ranks(cell) == [([True] * 5, True, 0)]


def test_a_child_process_of_a_rank_can_be_started_and_printed_from(kernel):
    text = kernel.ok(
        "%%distributed --nproc 2 --quiet\nimport os, subprocess\n!echo shell $RANK of $WORLD_SIZE\n"
        "subprocess.run(['echo', 'child'])\nos.system('echo system')"
    ).text

    assert "[0] shell 0 of 2" in text
    assert "[1] shell 1 of 2" in text
    assert "[0-1] child" in text
    assert "[0-1] system" in text


def test_await_and_magics_work_in_a_cell_on_the_ranks(kernel, on_ranks):
    assert on_ranks("import asyncio\nvalue = await asyncio.sleep(0, 'awaited')\nvalue") == ["awaited"]
    assert on_ranks("here = %pwd\nhere") == [str(kernel.cwd)]
