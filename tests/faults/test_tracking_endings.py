"""However a launch ends, its MLflow run says so; and whatever the server does, the launch goes on."""

from __future__ import annotations

import ast
import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from air_nb.protocol.tracking import TrackedRun, TrackedState
from air_nb.runs.directory import all_runs, find_run
from air_nb.runs.unsent import read_tracked
from air_nb.session.commands import stop_run
from tests.faults.conftest import TaggedKernel
from tests.support.kernel import Cell, running_kernel
from tests.support.mlflow_servers import (
    MlflowServer,
    failing_server,
    real_server,
    recovering_server,
    refusing_uri,
    silent_server,
)
from tests.support.mlflow_stores import StoredRun, read_runs, sqlite_store
from tests.support.wait import eventually

_PATIENCE_S = 120.0
_UNKNOWN = TrackedRun(TrackedState.PENDING, "")
_TAG = "AIR_NB_FAULT_TAG"
_TRACKING = "__import__('air_nb.session.session').session.session.get_session().tracking"
_STATE = (
    "(dict(__import__('os').environ), mlflow.active_run() and mlflow.active_run().info.run_id, "
    "mlflow.get_tracking_uri(), mlflow.get_registry_uri())"
)
_HANG = """
import mlflow, time
from air_nb.runs.checkpoints import record_checkpoint
from air_nb.runs.loading import LoadingFigures, record_loading
mlflow.log_metric("loss", 1.0)
record_loading(LoadingFigures(time.time(), 10.0, 3, 30, 2.5, 1.0))
record_checkpoint("/data/step_2.aa", 2, stall_s=0.25, seconds=2.0, size_bytes=4000)
print("go", flush=True)
time.sleep(600)
"""
_MEASURED = {"data_wait_percent": [(3, 25.0)], "checkpoint_stall_seconds": [(2, 0.25)]}


@contextmanager
def _tracked_kernel(directory: Path, **env: str) -> Iterator[TaggedKernel]:
    tag = uuid.uuid4().hex
    fixed = {
        "AIR_NB_DEVICE": "cpu",
        "AIR_NB_TRACKING": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
        "MLFLOW_EXPERIMENT_NAME": "endings",
        _TAG: tag,
    }
    with running_kernel(directory, env={**fixed, **env}) as kernel:
        yield TaggedKernel(kernel, tag)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    return sqlite_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[MlflowServer]:
    with real_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def tracked_kernel(tmp_path_factory, store) -> Iterator[TaggedKernel]:
    """A kernel that tests share; everything is warm, and the user has imported MLflow."""
    with _tracked_kernel(tmp_path_factory.mktemp("kernel"), MLFLOW_TRACKING_URI=store) as kernel:
        _warm(kernel, store)
        kernel.ok("import mlflow", 120)
        yield kernel


@pytest.fixture
def own_kernel(tmp_path) -> Iterator[TaggedKernel]:
    """A kernel of this test's own, with a store of its own."""
    store = sqlite_store(tmp_path)
    with _tracked_kernel(tmp_path, MLFLOW_TRACKING_URI=store) as kernel:
        _warm(kernel, store)
        yield kernel


def _warm(kernel: TaggedKernel, store: str) -> None:
    kernel.ok("%%distributed --nproc 1 --name warm\npass", 180)
    assert eventually(lambda: [run.status for run in read_runs(store)] == ["FINISHED"], _PATIENCE_S)


@pytest.fixture
def unchanged(tracked_kernel) -> Iterator[None]:
    """Fail a test that leaves the user's MLflow another than it was."""
    before = ast.literal_eval(tracked_kernel.value(_STATE))
    yield
    assert ast.literal_eval(tracked_kernel.value(_STATE)) == before


def _name() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


def _ended(store: str, name: str) -> StoredRun:
    """The run of this name, when MLflow has it as ended."""

    def runs() -> list[StoredRun]:
        return [run for run in read_runs(store) if run.name == name]

    assert eventually(lambda: [run.status != "RUNNING" for run in runs()] == [True], _PATIENCE_S), runs()
    return runs()[0]


def _error(cell: Cell) -> str:
    return cell.error["ename"] if cell.error is not None else ""


def _measured(run: StoredRun) -> dict[str, list[tuple[int, float]]]:
    """What a rank of ``_HANG`` has measured of itself, as MLflow has it."""
    keys = ("air_nb/data_wait_percent/rank_0", "air_nb/checkpoint_stall_seconds")
    return {key.split("/")[1]: run.metrics.get(key, []) for key in keys}


def _start(kernel: TaggedKernel, name: str, options: str = "--nproc 1") -> Cell:
    """Start a cell that never ends; returns when its ranks are at it."""
    cell = kernel.start(f"%%distributed {options} --name {name}\n{_HANG}")
    kernel.follow(cell, until=lambda cell: "go" in cell.text, timeout_s=_PATIENCE_S)
    assert not cell.idle_at, cell.text
    return cell


# ---------------------------------------------------------------------------------------------------- how a run ends


def test_a_rank_that_fails_makes_the_run_failed_with_what_and_which(tracked_kernel, unchanged, store):
    name = _name()
    cell = tracked_kernel.run(
        f"%%distributed --nproc 2 --name {name}\nprint('before')\nimport os, mlflow\nmlflow.log_metric('loss', 1.0)\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('too hot')\nimport time; time.sleep(60)",
        _PATIENCE_S,
    )
    assert "too hot" in cell.traceback
    run = _ended(store, name)
    assert run.status == "FAILED"
    assert (run.tags["air_nb.failure"], run.tags["air_nb.failing_rank"]) == ("ValueError: too hot", "1")
    assert run.metrics["loss"]
    assert "before" in run.artifacts["logs/rank_0.out"].read_text()
    assert "too hot" in cell.text
    assert run.ended_at is not None


def test_a_rank_that_is_killed_makes_the_run_failed(tracked_kernel, unchanged, store):
    name = _name()
    tracked_kernel.run(f"%%distributed --nproc 1 --name {name}\nimport os\nos.kill(os.getpid(), 9)", _PATIENCE_S)
    run = _ended(store, name)
    assert (run.status, run.tags["air_nb.failing_rank"]) == ("FAILED", "0")
    assert "SIGKILL" in run.tags["air_nb.failure"]


def test_an_interrupt_makes_the_run_killed(tracked_kernel, unchanged, store):
    name = _name()
    cell = _start(tracked_kernel, name)
    tracked_kernel.kernel.interrupt()
    tracked_kernel.follow(cell, timeout_s=_PATIENCE_S)
    assert _error(cell) == "KeyboardInterrupt"
    run = _ended(store, name)
    assert (run.status, run.metrics["loss"][0]) == ("KILLED", (0, 1.0))
    assert _measured(run) == _MEASURED
    assert "interrupt" in run.tags["air_nb.reason"]
    assert run.artifacts["logs/rank_0.out"].read_text() == "go\n"


def test_a_timeout_makes_the_run_killed(tracked_kernel, unchanged, store):
    name = _name()
    cell = tracked_kernel.run(f"%%distributed --nproc 2 --timeout 5 --name {name}\n{_HANG}", _PATIENCE_S)
    assert _error(cell) == "RunTimeoutError"
    run = _ended(store, name)
    assert run.status == "KILLED"
    assert "time limit" in run.tags["air_nb.reason"]


def test_a_stop_makes_the_run_killed(tracked_kernel, unchanged, store):
    name = _name()
    cell = _start(tracked_kernel, name)
    assert "was stopped" in stop_run(name)
    tracked_kernel.follow(cell, timeout_s=_PATIENCE_S)
    assert _error(cell) == "RunStoppedError"
    run = _ended(store, name)
    assert (run.status, run.tags["air_nb.reason"]) == ("KILLED", "%air stop")


def test_a_launcher_that_is_killed_makes_the_run_failed(tracked_kernel, unchanged, store):
    name = _name()
    launcher = tracked_kernel.launcher()
    cell = _start(tracked_kernel, name)
    launcher.kill()
    tracked_kernel.follow(cell, timeout_s=_PATIENCE_S)
    assert cell.reply_status == "error"
    run = _ended(store, name)
    assert (run.status, run.metrics["loss"][0]) == ("FAILED", (0, 1.0))
    assert "launcher" in run.tags["air_nb.failure"]


def test_a_tracking_process_that_is_killed_is_replaced_and_nothing_is_lost(tracked_kernel, unchanged, store):
    name = _name()
    pid = int(tracked_kernel.value(f"{_TRACKING}.pid"))
    cell = tracked_kernel.start(
        f"%%distributed --nproc 2 --name {name}\nimport mlflow, os, time\nrank = os.environ['RANK']\n"
        "for step in range(400):\n"
        "    mlflow.log_metric(f'loss_{rank}', step, step=step)\n"
        "    if step == 100: print('half', flush=True)\n"
        "    time.sleep(0.01)"
    )
    tracked_kernel.follow(cell, until=lambda cell: "half" in cell.text, timeout_s=_PATIENCE_S)
    os.kill(pid, signal.SIGKILL)
    tracked_kernel.follow(cell, timeout_s=_PATIENCE_S)
    assert cell.reply_status == "ok", cell.text
    run = _ended(store, name)
    assert run.status == "FINISHED"
    for rank in range(2):
        assert run.metrics[f"loss_{rank}"] == [(step, float(step)) for step in range(400)]


# ------------------------------------------------------------------------------------------------ how a kernel ends


def test_a_kernel_that_is_killed_leaves_a_run_that_is_ended_with_its_logs(own_kernel, tmp_path):
    name = _name()
    _start(own_kernel, name)
    own_kernel.kernel.kill()
    assert eventually(lambda: own_kernel.processes() == [], 20)
    run = next(run for run in read_runs(f"sqlite:///{tmp_path}/mlflow.db") if run.name == name)
    assert (run.status, run.metrics["loss"][0]) == ("KILLED", (0, 1.0))
    assert _measured(run) == _MEASURED
    assert run.artifacts["logs/rank_0.out"].read_text() == "go\n"
    assert "kernel" in run.tags["air_nb.reason"]


def test_restarts_and_shutdowns_right_after_a_cell_leave_complete_runs(own_kernel, tmp_path):
    store = f"sqlite:///{tmp_path}/mlflow.db"
    code = "import mlflow\nfor step in range(500):\n    mlflow.log_metric('loss', step, step=step)"
    own_kernel.ok(f"%%distributed --nproc 2 --name restarted\n{code}", _PATIENCE_S)
    own_kernel.kernel.restart()
    own_kernel.ok("%load_ext air_nb", _PATIENCE_S)
    own_kernel.ok(f"%%distributed --nproc 2 --name 'shut down'\n{code}", _PATIENCE_S)
    own_kernel.kernel.manager.shutdown_kernel(now=False)
    assert eventually(lambda: own_kernel.processes() == [], 20)
    with _tracked_kernel(tmp_path, MLFLOW_TRACKING_URI=store):  # finishes what MLflow's import left no time for
        for name in ("restarted", "shut down"):
            run = _ended(store, name)
            assert run.status == "FINISHED"
            assert {step for step, _ in run.metrics["loss"]} == set(range(500))
            assert set(run.artifacts) >= {"cell.py", "captured.json"}


def test_repair_ends_the_run_of_a_kernel_that_died_with_its_tracking_process(own_kernel, tracked_kernel, tmp_path):
    name = _name()
    tracking = psutil.Process(int(own_kernel.value(f"{_TRACKING}.pid")))
    _start(own_kernel, name)
    tracking.suspend()  # it must not see the kernel's end
    own_kernel.kernel.kill()
    tracking.kill()
    assert eventually(lambda: own_kernel.processes() == [], 20)
    store = f"sqlite:///{tmp_path}/mlflow.db"
    assert {run.status for run in read_runs(store) if run.name == name} == {"RUNNING"}
    said = tracked_kernel.ok("%air runs --repair", _PATIENCE_S).text
    assert f"run {name}: sent" in said
    run = _ended(store, name)
    assert (run.status, run.metrics["loss"][0]) == ("KILLED", (0, 1.0))
    assert _measured(run) == _MEASURED


def test_an_interrupt_before_any_rank_was_started_leaves_no_run(tmp_path):
    store = sqlite_store(tmp_path)
    with _tracked_kernel(tmp_path, MLFLOW_TRACKING_URI=store) as kernel:
        cell = kernel.start("%%distributed --nproc 1 --name never\npass")
        assert eventually(lambda: any(record.name == "never" for _, record in all_runs()), _PATIENCE_S)
        kernel.kernel.interrupt()
        kernel.follow(cell, timeout_s=_PATIENCE_S)
        assert "no rank was started" in cell.traceback
        assert "was not tracked" in kernel.run("%air runs --upload never", _PATIENCE_S).text
        kernel.ok("%%distributed --nproc 1 --name next\npass", 180)
        assert _ended(store, "next").status == "FINISHED"
        assert [run.name for run in read_runs(store)] == ["next"]


# ------------------------------------------------------------------------------------------------- what servers do

# Each rank its own values: MLflow keeps one of two metrics that agree in key, millisecond, step and value.
_LOGS = """\
import mlflow, os
for step in range(100):
    mlflow.log_metric('loss', step + int(os.environ['RANK']) / 2, step=step)
print('logged')"""


@pytest.fixture
def at(tracked_kernel, store):
    """Have launches go to another tracking URI, for one test."""

    def use(uri: str) -> None:
        tracked_kernel.ok(f"__import__('os').environ['MLFLOW_TRACKING_URI'] = {uri!r}")

    yield use
    use(store)


@contextmanager
def _refusing() -> Iterator[str]:
    with refusing_uri() as uri:
        yield uri


@contextmanager
def _silent() -> Iterator[str]:
    with silent_server() as culprit:
        yield culprit.uri


@contextmanager
def _answering(status: int) -> Iterator[str]:
    with failing_server(status) as culprit:
        yield culprit.uri


@pytest.mark.parametrize(
    "culprit",
    [_refusing, _silent, lambda: _answering(500), lambda: _answering(401)],
    ids=["refuses", "silent", "500", "401"],
)
def test_a_server_that_is_no_use_gets_one_line_and_the_cell_runs(tracked_kernel, at, culprit):
    with culprit() as uri:
        at(uri)
        before = ast.literal_eval(tracked_kernel.value(_STATE))
        name = _name()
        cell = tracked_kernel.ok(f"%%distributed --nproc 2 --name {name}\n{_LOGS}", _PATIENCE_S)
        (warning,) = cell.stream("stderr").splitlines()
        assert uri in warning
        assert f"%air runs --upload {find_run(name)[1].run_id}" in warning
        assert "logged" in cell.text
        assert "FINISHED" in cell.text
        assert ast.literal_eval(tracked_kernel.value(_STATE)) == before
        directory, _ = find_run(name)
        assert sum(path.stat().st_size > 0 for path in (directory.path / "mlflow").glob("rank_*.jsonl")) == 2
        assert "not sent" in tracked_kernel.ok(f"%air runs --upload {name}", _PATIENCE_S).text


@pytest.mark.parametrize("refuses", [True, False], ids=["refused", "was silent"])
def test_what_a_server_did_not_take_is_sent_when_it_has_recovered(tracked_kernel, at, server, refuses):
    with recovering_server(refuses=refuses) as culprit:
        at(culprit.uri)
        name = _name()
        tracked_kernel.ok(f"%%distributed --nproc 2 --name {name}\nlr = 1\n{_LOGS}", _PATIENCE_S)
        failed = _name()
        tracked_kernel.run(f"%%distributed --nproc 2 --name {failed}\nraise ValueError('too hot')", _PATIENCE_S)
        culprit.recover(server)
        for each in (name, failed):
            said = tracked_kernel.ok(f"%air runs --upload {each}", _PATIENCE_S).text
            # Complete: what was still being tried when the server recovered.
            assert "sent: " in said or "complete already" in said
        assert "has everything" in tracked_kernel.ok(f"%air runs --upload {name}", _PATIENCE_S).text
    run = _ended(server.store_uri, name)
    assert run.status == "FINISHED"
    assert [step for step, _ in run.metrics["loss"]] == sorted([*range(100), *range(100)])
    assert run.artifacts["logs/rank_1.out"].read_text() == "logged\n"
    assert "lr = 1" in run.artifacts["cell.py"].read_text()
    run = _ended(server.store_uri, failed)
    assert (run.status, run.tags["air_nb.failure"]) == ("FAILED", "ValueError: too hot")


def test_a_cell_does_not_wait_for_a_silent_server(tracked_kernel, at):
    with silent_server() as culprit:
        at(culprit.uri)
        cell = tracked_kernel.start("%%distributed --nproc 2\nprint('first', flush=True)\nimport time; time.sleep(10)")
        tracked_kernel.follow(cell, until=lambda cell: "first" in cell.text, timeout_s=_PATIENCE_S)
        assert cell.stream("stderr") == ""
        tracked_kernel.follow(cell, timeout_s=_PATIENCE_S)
        assert cell.stream("stderr").count(culprit.uri) == 1


def test_a_cell_that_was_over_before_its_server_has_not_answered_is_warned_of_in_the_next_one(tracked_kernel, at):
    with silent_server() as culprit:
        at(culprit.uri)
        name = _name()
        cell = tracked_kernel.ok(f"%%distributed --nproc 1 --name {name}\npass", _PATIENCE_S)
        assert cell.stream("stderr") == ""
        directory, record = find_run(name)
        assert eventually(lambda: (read_tracked(directory.path) or _UNKNOWN).problem is not None, _PATIENCE_S)
        text = tracked_kernel.ok("%%distributed --nproc 1\npass", _PATIENCE_S).stream("stderr")
        assert culprit.uri in text
        assert f"run {name} " in text
        assert record.run_id in text


def test_an_interrupt_is_not_held_up_by_a_silent_server(tracked_kernel, at):
    with silent_server() as culprit:
        at(culprit.uri)
        cell = _start(tracked_kernel, _name())
        tracked_kernel.kernel.interrupt()
        tracked_kernel.follow(cell, timeout_s=_PATIENCE_S)
        assert _error(cell) == "KeyboardInterrupt"
