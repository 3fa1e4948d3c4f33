"""The tracking process with MLflow's own sqlite store: what ends up there, whatever happens to whom."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from air_nb.protocol.messages import RunState
from air_nb.protocol.tracking import TRACKED_FILE, TrackedRun, TrackedState, spool_name
from air_nb.runs.directory import RunDirectory
from air_nb.runs.liveness import ProcessId
from air_nb.runs.paths import node_local
from air_nb.tracking.client import TrackingClient
from tests.support.mlflow_stores import StoredRun, read_runs, sqlite_path, sqlite_store
from tests.support.tracked_runs import EXPERIMENT, LaunchedRun, tracking_environment
from tests.support.wait import eventually

_PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def client() -> Iterator[TrackingClient]:
    """The kernel's end of one process for all tests that leave it alone."""
    client = TrackingClient()
    client.start()
    assert client.wait_ready(_PATIENCE_S)
    yield client
    client.close()


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store that tests share: each looks at its own runs."""
    return sqlite_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def own_client() -> Iterator[TrackingClient]:
    """For a test that does something to the process."""
    client = TrackingClient()
    yield client
    client.close()


def _stored(uri: str, run_id: str) -> StoredRun:
    return next(run for run in read_runs(uri) if run.run_id == run_id)


def _begin(client: TrackingClient, run: LaunchedRun, **env: str) -> str:
    client.begin(run.path, tracking_environment(**env))
    return run.wait_open()


def _end(client: TrackingClient, run: LaunchedRun) -> None:
    client.end(run.path)
    assert client.wait_ended(run.path, _PATIENCE_S)
    assert run.tracked.state is TrackedState.ENDED, run.tracked


# ------------------------------------------------------------------------------------------------- what is logged


def test_a_run_is_open_with_its_name_and_tags_as_soon_as_it_is_launched(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path, source_name="/home/me/train.ipynb", parent_run_id="ab" * 16)
    run_id = _begin(client, run)
    stored = _stored(uri, run_id)
    assert (stored.status, stored.name, stored.experiment) == ("RUNNING", "calm-otter-41", EXPERIMENT)
    assert stored.parent == "ab" * 16
    assert stored.tags["mlflow.source.name"] == "/home/me/train.ipynb"
    assert stored.tags["mlflow.source.type"] == "LOCAL"
    assert stored.tags["air_nb.run_id"] == run.run_id
    assert stored.tags["mlflow.user"]
    assert run.tracked.experiment_name == EXPERIMENT
    run.close_record()
    _end(client, run)


def test_a_finished_run_has_parameters_source_names_logs_and_the_time_of_its_end(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path, captured={"model": 1234})
    run_id = _begin(client, run)
    run.write_log("epoch 1\n")
    run.write_log("a warning\n", rank=1, stream="err")
    run.close_record(ended_at=1_800_000_000.5)
    _end(client, run)
    stored = _stored(uri, run_id)
    assert (stored.status, stored.ended_at) == ("FINISHED", 1_800_000_000_500)
    assert stored.params["air_nb.device"] == "cpu"
    assert {name: path.read_text() for name, path in stored.artifacts.items() if name != "captured.json"} == {
        "cell.py": "print('hello')\n",
        "logs/rank_0.out": "epoch 1\n",
        "logs/rank_1.err": "a warning\n",
    }
    assert json.loads(stored.artifacts["captured.json"].read_text()) == {"model": {"pickled_bytes": 1234}}


def test_artifacts_of_a_new_experiment_are_below_the_kernels_directory_as_with_mlflow_itself(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path, experiment_name="elsewhere")
    run_id = _begin(client, run)
    run.close_record()
    _end(client, run)
    assert _stored(uri, run_id).artifact_root.is_relative_to(tmp_path / "mlruns")


def test_the_commit_and_whether_the_tree_is_dirty_are_logged(client, uri, tmp_path):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    (tmp_path / "train.py").write_text("1\n")
    git("init")
    git("add", "train.py")
    git("commit", "-m", "first")
    (tmp_path / "train.py").write_text("2\n")
    run = LaunchedRun(uri, tmp_path)
    run_id = _begin(client, run)
    run.close_record()
    _end(client, run)
    stored = _stored(uri, run_id)
    assert stored.tags["mlflow.source.git.commit"] == stored.params["air_nb.git_commit"] == git("rev-parse", "HEAD")
    assert stored.params["air_nb.git_dirty"] == "true"


def test_everything_that_8_ranks_log_arrives_once(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path, nproc=8)
    run_id = _begin(client, run)
    for step in range(1000):
        for rank in range(8):
            run.log_metric(f"loss_{rank}", step / 7, step, rank)
    run.log(3, params=[("lr", "0.1")], tags=[("air_nb.checkpoint.5", "/data/step_5")])
    run.log(0, run_name="a better name")
    run.close_record()
    _end(client, run)
    stored = _stored(uri, run_id)
    expected = [(step, step / 7) for step in range(1000)]
    assert stored.metrics == {f"loss_{rank}": expected for rank in range(8)}
    assert stored.params["lr"] == "0.1"
    assert stored.tags["air_nb.checkpoint.5"] == "/data/step_5"
    assert stored.name == "a better name"
    assert run.tracked.sent == [(run.path / spool_name(rank)).stat().st_size for rank in range(8)]


def test_metrics_are_forwarded_while_the_run_goes_on(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path)
    run_id = _begin(client, run)
    run.log_metric("loss", 1.0)
    assert eventually(lambda: _stored(uri, run_id).metrics == {"loss": [(0, 1.0)]}, _PATIENCE_S)
    assert _stored(uri, run_id).status == "RUNNING"
    run.close_record()
    _end(client, run)


def test_what_the_store_refuses_is_listed_and_holds_up_nothing(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path)
    run_id = _begin(client, run)
    run.log_metric("before", 1.0)
    run.log(0, params=[("lr", "0.1")])
    run.log(1, params=[("lr", "0.2"), ("other", "x")])
    run.log(1, metrics=[("too far", 1.0, 1_800_000_000_000, 2**70)])
    run.log_metric("k" * 300, 1.0)
    run.log_metric("after", 2.0)
    run.close_record()
    _end(client, run)
    stored = _stored(uri, run_id)
    assert set(stored.metrics) == {"before", "after"}
    assert (stored.params["lr"], stored.params["other"]) == ("0.1", "x")
    assert stored.status == "FINISHED"
    named = ["lr='0.2'", "too far", "kkkk"]
    assert [sum(name in sentence for sentence in run.tracked.refused) for name in named] == [1, 1, 1]


def test_an_artifact_that_a_rank_left_is_sent_and_its_copy_deleted(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path)
    run_id = _begin(client, run)
    (run.path / "copies" / "1").mkdir(parents=True)
    (run.path / "copies" / "1" / "figure.txt").write_text("a figure")
    (run.path / "copies" / "model.bin").write_text("a model")
    run.log(0, artifact=("copies/1", "plots"))
    run.log(0, artifact=("copies/model.bin", None))
    run.log(0, artifact=("../../../outside", None))
    run.close_record()
    _end(client, run)
    artifacts = _stored(uri, run_id).artifacts
    assert artifacts["plots/figure.txt"].read_text() == "a figure"
    assert artifacts["model.bin"].read_text() == "a model"
    assert list((run.path / "copies").iterdir()) == []
    assert run.tracked.refused == []


def test_mlflows_own_system_metrics_are_in_the_run(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path)
    more = {"MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "true", "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.2"}
    run_id = _begin(client, run, **more)
    key = "system/cpu_utilization_percentage"
    assert eventually(lambda: key in _stored(uri, run_id).metrics, _PATIENCE_S)
    run.close_record()
    _end(client, run)


# ------------------------------------------------------------------------------------------------------- endings


@pytest.mark.parametrize(
    "record, status, tags",
    [
        (
            {"state": RunState.FAILED, "failures": [{"rank": 3, "type_name": "ValueError", "message": "bad shape"}]},
            "FAILED",
            {"air_nb.failure": "ValueError: bad shape", "air_nb.failing_rank": "3"},
        ),
        ({"state": RunState.KILLED, "reason": "interrupted"}, "KILLED", {"air_nb.reason": "interrupted"}),
        ({"state": RunState.TIMED_OUT, "reason": "timeout of 3 s"}, "KILLED", {"air_nb.reason": "timeout of 3 s"}),
    ],
)
def test_how_a_run_ended_is_its_status_and_its_tags(client, uri, tmp_path, record, status, tags):
    run = LaunchedRun(uri, tmp_path)
    run_id = _begin(client, run)
    run.close_record(**record)
    _end(client, run)
    stored = _stored(uri, run_id)
    assert stored.status == status
    assert {key: value for key, value in stored.tags.items() if key in tags} == tags


def test_a_nested_run_that_a_killed_rank_left_running_is_ended_too(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path)
    run_id = _begin(client, run)
    child = LaunchedRun(uri, tmp_path, parent_run_id=run_id)
    child_id = _begin(client, child)
    run.close_record(RunState.KILLED, reason="interrupted")
    _end(client, run)
    assert _stored(uri, child_id).status == "KILLED"
    child.close_record()
    _end(client, child)


def test_a_run_of_the_users_own_is_resumed_and_parameters_that_differ_become_tags(client, uri, tmp_path):
    first = LaunchedRun(uri, tmp_path, params={"air_nb.nproc_per_node": "2", "air_nb.device": "cpu"})
    run_id = _begin(client, first)
    first.close_record()
    _end(client, first)
    again = LaunchedRun(
        uri,
        tmp_path,
        experiment_name="another",
        resume_run_id=run_id,
        params={"air_nb.nproc_per_node": "8", "air_nb.device": "cpu", "air_nb.new": "1"},
    )
    assert _begin(client, again) == run_id
    assert _stored(uri, run_id).status == "RUNNING"
    assert again.tracked.experiment_name == EXPERIMENT
    again.log_metric("more", 1.0)
    again.close_record()
    _end(client, again)
    stored = _stored(uri, run_id)
    assert stored.status == "FINISHED"
    assert (stored.params["air_nb.nproc_per_node"], stored.tags["air_nb.nproc_per_node"]) == ("2", "8")
    assert stored.params["air_nb.new"] == "1"
    assert "more" in stored.metrics
    assert again.tracked.refused == []


# ---------------------------------------------------------------------------------------- what can't be opened (yet)


def test_a_run_to_resume_that_does_not_exist_is_a_problem(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path, resume_run_id="0" * 32)
    client.begin(run.path, tracking_environment())
    assert "0" * 32 in run.wait_problem()
    run.close_record()
    client.end(run.path)
    assert client.wait_ended(run.path, _PATIENCE_S)
    assert run.tracked.state is TrackedState.PENDING


def test_a_deleted_experiment_is_a_problem_until_it_is_restored_as_the_problem_says(client, uri, tmp_path):
    first = LaunchedRun(uri, tmp_path, experiment_name="short-lived")
    _begin(client, first)
    first.close_record()
    _end(client, first)
    _set_lifecycle(uri, "short-lived", "deleted")
    run = LaunchedRun(uri, tmp_path, experiment_name="short-lived")
    client.begin(run.path, tracking_environment())
    assert "mlflow experiments restore" in run.wait_problem()
    _set_lifecycle(uri, "short-lived", "active")
    _begin(client, run)
    assert run.tracked.problem is None
    run.close_record()
    _end(client, run)


def _set_lifecycle(uri: str, experiment: str, stage: str) -> None:
    with closing(sqlite3.connect(sqlite_path(uri), timeout=30)) as database:
        database.execute("UPDATE experiments SET lifecycle_stage = ? WHERE name = ?", (stage, experiment))
        database.commit()


# -------------------------------------------------------------------------------------------------- several at once


@pytest.mark.slow
def test_two_kernels_share_a_store_that_neither_has_made_yet(tmp_path):
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    clients = [TrackingClient(), TrackingClient()]
    runs = [LaunchedRun(uri, tmp_path, nproc=1) for _ in clients]
    try:
        for client, run in zip(clients, runs, strict=True):
            client.begin(run.path, tracking_environment())
        for run in runs:
            run.wait_open()
        with ThreadPoolExecutor() as threads:
            list(threads.map(_log_slowly, runs))
        for client, run in zip(clients, runs, strict=True):
            run.close_record()
            _end(client, run)
    finally:
        for client in clients:
            client.close()
    stored = read_runs(uri)
    assert len({run.experiment_id for run in stored}) == 1
    assert [(run.status, len(run.metrics["loss"])) for run in stored] == [("FINISHED", 2000)] * 2


def _log_slowly(run: LaunchedRun) -> None:
    for step in range(2000):
        run.log_metric("loss", 1.0, step)
        time.sleep(0.001)


def test_a_locked_database_delays_and_loses_nothing(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path)
    run_id = _begin(client, run)
    with closing(sqlite3.connect(sqlite_path(uri), timeout=30, isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        run.log_metric("loss", 1.0)
        time.sleep(1.5)
        database.execute("ROLLBACK")
    run.close_record()
    _end(client, run)
    assert _stored(uri, run_id).metrics == {"loss": [(0, 1.0)]}


# --------------------------------------------------------------------------------------------------- processes that end


def test_a_process_that_is_killed_is_replaced_and_goes_on_with_the_same_mlflow_run(own_client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path)
    run_id = _begin(own_client, run)
    run.log_metric("before", 1.0)
    first = own_client.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    run.log_metric("after", 2.0)
    assert eventually(lambda: own_client.pid not in {None, first}, _PATIENCE_S)
    run.close_record()
    _end(own_client, run)
    stored = _stored(uri, run_id)
    assert stored.status == "FINISHED"
    assert set(stored.metrics) == {"before", "after"}
    assert [other.tags["air_nb.run_id"] for other in read_runs(uri)].count(run.run_id) == 1


def test_a_child_that_the_kernel_forks_leaves_the_process_to_it(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path)
    run_id = _begin(client, run)
    child = os.fork()
    if child == 0:
        client.close()  # as its exit handlers may
        os._exit(0 if client.pid is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    run.close_record()
    _end(client, run)
    assert _stored(uri, run_id).status == "FINISHED"


def test_closing_the_session_ends_what_is_open(own_client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path)
    run_id = _begin(own_client, run)
    run.log_metric("loss", 1.0)
    run.write_log("the last words\n")
    run.close_record(RunState.KILLED, reason="the kernel ended")
    process = ProcessId.of(own_client.pid or 0)
    assert process is not None
    own_client.close()
    assert not process.is_alive()
    stored = _stored(uri, run_id)
    assert stored.status == "KILLED"
    assert stored.artifacts["logs/rank_0.out"].read_text() == "the last words\n"
    assert run.tracked.state is TrackedState.ENDED


def test_a_run_whose_directory_moves_home_while_it_is_sent_is_found_again(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path)
    run_id = _begin(client, run)
    home_path = run.path
    away = node_local() / "runs" / run.run_id
    away.parent.mkdir(exist_ok=True)
    home_path.rename(away)
    home_path = run.path
    run.path = away
    run.write_log("hello\n")
    moved = threading.Timer(0.0, lambda: away.rename(home_path))
    run.log_metric("loss", 1.0)
    run.close_record()
    moved.start()
    moved.join()
    client.end(home_path)
    assert client.wait_ended(home_path, _PATIENCE_S)
    assert _stored(uri, run_id).artifacts["logs/rank_0.out"].read_text() == "hello\n"
    assert run.tracked.state is TrackedState.ENDED


# ------------------------------------------------------------------------------------------------ runs of the past


def test_a_run_that_nobody_looked_after_is_sent_later_from_its_directory_alone(client, uri, tmp_path):
    ended = ProcessId(2**22 - 1, 1)
    run = LaunchedRun(uri, tmp_path, kernel=ended)
    run.log_metric("loss", 1.0)
    run.write_log("hello\n")
    run.close_record(RunState.FAILED, reason="no rank could be forked", ended_at=1_800_000_000.0)
    outcome = client.finish([run.path], tracking_environment(), _PATIENCE_S)
    assert outcome[run.run_id].startswith("sent: ")
    stored = _stored(uri, run.tracked.mlflow_run_id or "")
    assert (stored.status, stored.ended_at) == ("FAILED", 1_800_000_000_000)
    assert stored.metrics == {"loss": [(0, 1.0)]}
    assert "logs/rank_0.out" in stored.artifacts
    again = client.finish([run.path], tracking_environment(), _PATIENCE_S)
    assert again[run.run_id].startswith("complete already: ")


def test_a_run_that_was_made_although_nobody_saw_the_answer_is_not_made_again(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path, kernel=ProcessId(2**22 - 1, 1))
    run_id = _begin(client, run)
    run.close_record()
    _end(client, run)
    RunDirectory(run.path).write_private(TRACKED_FILE, TrackedRun(TrackedState.PENDING, uri).encode())
    assert "sent" in client.finish([run.path], tracking_environment(), _PATIENCE_S)[run.run_id]
    assert run.tracked.mlflow_run_id == run_id
    assert [other.tags["air_nb.run_id"] for other in read_runs(uri)].count(run.run_id) == 1


def test_runs_that_can_not_be_sent_say_why(client, uri, tmp_path):
    live = LaunchedRun(uri, tmp_path)
    untracked = LaunchedRun(uri, tmp_path, kernel=ProcessId(2**22 - 1, 1))
    untracked.close_record()
    (untracked.path / "tracking.json").unlink()
    missing = Path("/nowhere/20200101-000000-00000000")
    outcomes = client.finish([live.path, untracked.path, missing], tracking_environment(), _PATIENCE_S)
    assert "still running" in outcomes[live.run_id]
    assert "not tracked" in outcomes[untracked.run_id]
    assert outcomes[missing.name]


def test_a_run_that_another_process_is_sending_is_left_to_it(client, own_client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path)
    _begin(client, run)
    run.close_record()
    outcome = own_client.finish([run.path], tracking_environment(), _PATIENCE_S)
    assert "another process" in outcome[run.run_id]
    _end(client, run)


# ------------------------------------------------------------------------------------------------- MLflow's inside

_CANARY = """
import inspect, sys, threading
from mlflow.store.db import utils
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking._tracking_service.utils import _get_store
assert utils.MAX_RETRY_COUNT > 1
assert "MAX_RETRY_COUNT" in inspect.getsource(utils.create_sqlalchemy_engine_with_retry)
assert list(inspect.signature(utils._safe_initialize_tables).parameters) == ["engine"]
assert list(inspect.signature(_get_store).parameters) == ["store_uri", "artifact_uri"]
assert isinstance(_get_store(sys.argv[1], "/tmp/mlruns"), SqlAlchemyStore)
monitor = SystemMetricsMonitor("0" * 32, tracking_uri=sys.argv[1])
assert monitor._process is None
monitor.start()
assert isinstance(monitor._process, threading.Thread)
monitor.finish()
"""


def test_what_we_lean_on_inside_mlflow_is_still_there(uri):
    done = subprocess.run([sys.executable, "-c", _CANARY, uri], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------------- secrets


def test_the_environment_is_written_to_no_file(client, uri, tmp_path, test_environment):
    run = LaunchedRun(uri, tmp_path)
    _begin(client, run, MLFLOW_TRACKING_PASSWORD="a-secret-of-mine")
    run.close_record()
    _end(client, run)
    files = [path for root in (test_environment, tmp_path) for path in root.rglob("*") if path.is_file()]
    assert run.path / "mlflow.json" in files
    assert [path for path in files if b"a-secret-of-mine" in path.read_bytes()] == []


def test_files_of_a_run_are_for_the_user_alone(client, uri, tmp_path):
    run = LaunchedRun(uri, tmp_path)
    _begin(client, run)
    run.close_record()
    _end(client, run)
    assert {
        path.name: oct(path.stat().st_mode & 0o077) for path in run.path.iterdir() if path.stat().st_mode & 0o077
    } == {}
