"""A recorded run goes on from a checkpoint without a cell: what the panel's Resume does, in a real kernel."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from air_nb.protocol.task import RankTask
from air_nb.runs.checkpoints import committed_checkpoints
from air_nb.runs.directory import RunDirectory, RunRecord, find_run
from air_nb.runs.logs import read_tail
from tests.nvml.fixtures import nvml_library  # noqa: F401 - a fixture
from tests.nvml.stub import FakeNvml
from tests.support.kernel import Kernel, running_kernel
from tests.support.mlflow_stores import read_runs, sqlite_store
from tests.support.wait import eventually

pytestmark = pytest.mark.timeout(300)

_PATIENCE_S = 90.0
_ENV = {"AIR_NB_DEVICE": "cpu"}

_TRAINING = """
import os, time
from pathlib import Path

import torch
from air_nb.checkpoint import CheckpointManager
from air_nb.data import DataLoader
from air_nb.runtime import init_process_group

init_process_group()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 2)), batch_size=1, num_workers=0)
manager = CheckpointManager("checkpoints", model=model, optimizer=optimizer, data=loader, every=2, keep=50)
print(greeting)
with manager:
    for step, (x,) in manager.steps():
        model(x).sum().backward()
        optimizer.step()
        print(f"<step {step}>", flush=True)
        while Path("hold").exists():
            time.sleep(0.05)
        if (Path("fail") / os.environ["AIR_NB_RUN_NAME"]).exists():
            raise ValueError("asked to fail")
        time.sleep(pause_s)
"""

_PANEL = "from air_nb.session.panel import PanelActions\nfrom air_nb.session.session import get_session"


def _train(kernel: Kernel, name: str) -> None:
    """Train until a checkpoint is there, and stop."""
    kernel.ok("pause_s, greeting = 0.2, 'hello'")
    cell = kernel.start(f"%%distributed --nproc 2 --name {name}\n{_TRAINING}")
    kernel.follow(cell, until=lambda cell: "<step 5>" in cell.text, timeout_s=_PATIENCE_S)
    kernel.interrupt()
    kernel.follow(cell, timeout_s=_PATIENCE_S)
    assert cell.error is not None, cell.text
    assert cell.error["ename"] == "KeyboardInterrupt", cell.text


def _resume(kernel: Kernel, name: str, step: int = 4) -> RunDirectory:
    directory, record = find_run(name)
    path = next(one.path for one in committed_checkpoints(directory.path) if one.step == step)
    kernel.ok(f"{_PANEL}\nresumed = PanelActions(get_session()).resume({record.run_id!r}, {path!r})")
    return find_run(json.loads(kernel.value("resumed").replace("'", '"')))[0]


def _record(directory: RunDirectory) -> RunRecord:
    return find_run(directory.run_id)[1]


def _ends(directory: RunDirectory) -> RunRecord:
    assert eventually(lambda: _record(directory).state.is_final, _PATIENCE_S), _log(directory)
    return _record(directory)


def _log(directory: RunDirectory) -> str:
    return read_tail(directory, 0, None)


def _shows(directory: RunDirectory, text: str) -> None:
    assert eventually(lambda: text in _log(directory), _PATIENCE_S), (_log(directory), _record(directory))


@pytest.fixture(scope="module")
def trained(kernel: Kernel) -> str:
    _train(kernel, "stopped-one")
    return "stopped-one"


@pytest.fixture
def held(kernel: Kernel) -> Iterator[Path]:
    """Ranks stay in the step that they are in, while this file is there."""
    path = kernel.cwd / "hold"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def test_it_goes_on_at_the_checkpoints_step_while_the_kernel_runs_other_cells(kernel, trained, held):
    directory = _resume(kernel, trained)
    _shows(directory, "<step 4>")
    assert kernel.value("1 + 1") == "2"
    record = find_run(trained)[1]
    again = kernel.run(f"{_PANEL}\nPanelActions(get_session()).resume({record.run_id!r}, '/')")
    assert again.error is not None
    assert "run stopped-one-2 has not ended: stop it first" in again.error["evalue"]
    held.unlink()
    record = _ends(directory)

    assert record.state == "FINISHED"
    assert (record.name, record.nproc, record.options["resume"][:1]) == ("stopped-one-2", 2, "/")
    assert record.resumed_from == find_run(trained)[1].run_id
    log = _log(directory)
    assert "hello" in log
    assert "resumed step 4" in log
    assert "<step 3>" not in log
    assert "<step 11>" in log
    assert "stopped-one-2" in kernel.ok("%air runs").text


def test_an_interrupt_of_a_cell_does_not_hit_it_and_stop_ends_it(kernel, trained, held):
    directory = _resume(kernel, trained)
    _shows(directory, "<step 4>")
    cell = kernel.start("print('sleeping')\nimport time; time.sleep(60)")
    kernel.follow(cell, until=lambda cell: "sleeping" in cell.text)
    kernel.interrupt()
    kernel.follow(cell)
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    time.sleep(0.5)
    assert _record(directory).is_live

    held.unlink()  # it saves at the end of the step, and may take its time for that
    assert kernel.value(f"PanelActions(get_session()).stop({directory.run_id!r})").endswith("was stopped'")
    record = _record(directory)
    assert (record.state, record.reason) == ("KILLED", "Stop in the panel")


def test_a_failure_is_in_its_row_and_at_the_end_of_its_log(kernel, trained, held):
    directory = _resume(kernel, trained)
    (kernel.cwd / "fail").mkdir(exist_ok=True)
    (kernel.cwd / "fail" / _record(directory).name).touch()
    held.unlink()
    record = _ends(directory)

    assert record.state == "FAILED"
    kernel.ok(f"panel = PanelActions(get_session())\nchunk = panel.log({directory.run_id!r}, 0, -1)")
    assert kernel.value("chunk.is_end") == "True"
    assert "ValueError: asked to fail" in kernel.ok("print(chunk.text)").text
    reason = kernel.value(f"next(row.reason for row in panel.runs() if row.run_id == {directory.run_id!r})")
    assert "ValueError: asked to fail" in reason
    assert "ValueError: asked to fail" in kernel.ok("%air runs").text


def test_a_function_is_called_again_with_its_arguments(kernel):
    kernel.ok(
        "from air_nb import distributed\n"
        "@distributed(nproc=2, device='cpu', name='function')\n"
        "def train(offset, *, scale):\n"
        "    import os\n"
        "    print('got', offset, scale, os.environ['AIR_NB_RESUME'] if 'AIR_NB_RESUME' in os.environ else None)\n"
        "    return offset * scale\n"
        "assert train.distributed(3, scale=7) == [21, 21]"
    )
    record = find_run("function")[1]
    (kernel.cwd / "some_checkpoint").mkdir()
    path = str(kernel.cwd / "some_checkpoint")
    kernel.ok(f"{_PANEL}\nPanelActions(get_session()).resume({record.run_id!r}, {path!r})")
    directory = find_run("function-2")[0]
    assert _ends(directory).state == "FINISHED"
    assert f"got 3 7 {path}" in _log(directory)
    assert not list(directory.path.glob("rank_*.result"))


def test_options_env_is_known_to_the_kernel_that_was_given_it(kernel, tmp_path):
    kernel.ok("%%distributed --nproc 1 --name with-env --env SECRET=s3cr3t\nimport os; print(os.environ['SECRET'])")
    record = find_run("with-env")[1]
    resume = f"{_PANEL}\nPanelActions(get_session()).resume({record.run_id!r}, '/')"
    kernel.ok(resume)
    directory = find_run("with-env-2")[0]
    assert _ends(directory).state == "FINISHED"
    assert "s3cr3t" in _log(directory)
    with running_kernel(tmp_path, env=_ENV) as other:
        cell = other.run(resume)
    assert "it had --env SECRET, whose values only the kernel knows that launched it" in cell.traceback


def test_after_a_restart_the_old_run_is_resumed_and_a_killed_kernel_takes_the_ranks_along(tmp_path):
    with running_kernel(tmp_path, env=_ENV) as kernel:
        _train(kernel, "before-restart")
        kernel.restart()
        kernel.ok("%load_ext air_nb")
        (tmp_path / "hold").touch()
        directory = _resume(kernel, "before-restart")
        _shows(directory, "<step 4>")
        ranks = [psutil.Process(rank.pid) for rank in _record(directory).ranks if rank is not None]
        assert len(ranks) == 2
        kernel.kill()
        assert eventually(lambda: not any(rank.is_running() for rank in ranks), 10)
        assert _ends(directory).state == "KILLED"


def test_unloading_the_extension_ends_it(tmp_path):
    with running_kernel(tmp_path, env=_ENV) as kernel:
        _train(kernel, "unloaded")
        (tmp_path / "hold").touch()
        directory = _resume(kernel, "unloaded")
        _shows(directory, "<step 4>")
        kernel.ok("%unload_ext air_nb", timeout_s=30)
        assert _ends(directory).state == "KILLED"
        threads = "[t.name for t in __import__('threading').enumerate() if 'resume' in t.name]"
        assert eventually(lambda: kernel.value(threads) == "[]", 10)


def test_a_run_that_waits_for_the_launcher_can_be_stopped(tmp_path):
    with running_kernel(tmp_path, env=_ENV) as kernel:
        kernel.ok("%%distributed --nproc 1 --name early\npass", timeout_s=_PATIENCE_S)
        run_id = find_run("early")[1].run_id
        kernel.ok("import os; os.environ['OMP_NUM_THREADS'] = '3'")  # needs a new launcher, which takes seconds
        kernel.ok(f"{_PANEL}\npanel = PanelActions(get_session())\nnew = panel.resume({run_id!r}, '/')\npanel.close()")
        assert kernel.value("[t.name for t in __import__('threading').enumerate() if 'resume' in t.name]") == "[]"
        record = find_run("early-2")[1]
    assert (record.state, record.reason, record.started_at) == ("KILLED", "the extension was unloaded", None)


def test_closing_the_panel_ends_what_it_has_resumed_and_asks_for_no_values(kernel):
    code = "import os, time\ntime.sleep(600 if 'AIR_NB_RESUME' in os.environ else 0)\nos.getpid()"
    kernel.ok(f"%%distributed --nproc 1 --name closed --out pids\n{code}")
    run_id = find_run("closed")[1].run_id
    kernel.ok(f"{_PANEL}\npanel = PanelActions(get_session())\npanel.resume({run_id!r}, '/')")
    directory = find_run("closed-2")[0]
    assert RankTask.read(directory.path).out is None
    assert eventually(lambda: _record(directory).state == "RUNNING", _PATIENCE_S)
    kernel.ok("panel.close()")
    record = _record(directory)
    assert (record.state, record.reason) == ("KILLED", "the extension was unloaded")


def test_gpus_that_another_run_holds_are_not_taken_and_its_own_are_given_back(nvml_library, tmp_path):  # noqa: F811
    machine = FakeNvml(nvml_library, tmp_path / "nvml.txt")
    machine.describe("count 2")
    with running_kernel(tmp_path, env=machine.environment) as kernel:
        code = "import os, time\nprint(os.environ['CUDA_VISIBLE_DEVICES'])"
        kernel.ok(f"%%distributed --gpus 2 --name on-gpus\n{code}\ntime.sleep(0.5)", timeout_s=_PATIENCE_S)
        run_id = find_run("on-gpus")[1].run_id
        resume = f"{_PANEL}\nPanelActions(get_session()).resume({run_id!r}, '/')"
        kernel.ok(f"%%distributed --gpus 2 --name too\n{code}", timeout_s=_PATIENCE_S)
        too = find_run("too")[1].run_id
        kernel.ok(resume)
        cell = kernel.run(f"PanelActions(get_session()).resume({too!r}, '/')")
        assert cell.error is not None
        assert cell.error["ename"] == "DeviceError"
        assert "run on-gpus-2" in cell.traceback
        assert _ends(first := find_run("on-gpus-2")[0]).state == "FINISHED"
        assert machine.uuid(1) in _log(first)
        assert eventually(lambda: kernel.run(resume).reply_status == "ok", 10)
        assert _ends(find_run("on-gpus-3")[0]).state == "FINISHED"


def test_it_is_tracked_in_the_experiment_of_the_old_run(tmp_path):
    store = sqlite_store(tmp_path)
    env = _ENV | {"AIR_NB_TRACKING": "1", "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false"}
    with running_kernel(tmp_path, env=env | {"MLFLOW_DISABLE_TELEMETRY": "true"}) as kernel:
        kernel.ok("%env MLFLOW_EXPERIMENT_NAME=mine")
        kernel.ok("%%distributed --nproc 1 --name tracked\npass", timeout_s=_PATIENCE_S)
        kernel.ok("%env MLFLOW_EXPERIMENT_NAME=other")
        run_id = find_run("tracked")[1].run_id
        kernel.ok(f"{_PANEL}\nPanelActions(get_session()).resume({run_id!r}, '/')")
        assert _ends(find_run("tracked-2")[0]).state == "FINISHED"
        assert eventually(lambda: [run.status for run in read_runs(store)] == ["FINISHED"] * 2, _PATIENCE_S)
    runs = read_runs(store)
    assert {run.tags["mlflow.runName"] for run in runs} == {"tracked", "tracked-2"}
    assert [run.experiment for run in runs] == ["mine", "mine"]
