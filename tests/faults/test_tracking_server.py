"""The tracking process when its server, its disk or its kernel is not what it should be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from air_nb.protocol.messages import RunState
from air_nb.protocol.tracking import TrackedState, spool_name
from air_nb.runs.liveness import ProcessId
from air_nb.tracking.client import TrackingClient
from tests.support.mlflow_servers import (
    MlflowServer,
    failing_server,
    real_server,
    recovering_server,
    refusing_uri,
    silent_server,
)
from tests.support.mlflow_stores import StoredRun, read_runs, sqlite_store
from tests.support.tracked_runs import LaunchedRun, tracking_environment
from tests.support.wait import eventually

_PATIENCE_S = 60.0
_EXIT_S = 10.0  # 3 s is the promise, timed by the benchmarks


@pytest.fixture(scope="module")
def client() -> Iterator[TrackingClient]:
    """The kernel's end of one process for all tests that leave it alone."""
    client = TrackingClient()
    client.start()
    assert client.wait_ready(_PATIENCE_S)
    yield client
    client.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """A real one."""
    with real_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "air_nb_test", str(path)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def _stored(server: MlflowServer, run: LaunchedRun) -> StoredRun:
    return next(stored for stored in read_runs(server.store_uri) if stored.run_id == run.tracked.mlflow_run_id)


def _begin(client: TrackingClient, run: LaunchedRun, **env: str) -> None:
    client.begin(run.path, tracking_environment(**env))


def _end(client: TrackingClient, run: LaunchedRun) -> None:
    run.close_record()
    client.end(run.path)
    assert client.wait_ended(run.path, _PATIENCE_S)


# ----------------------------------------------------------------------------------------------------- a real server


def test_a_real_server_gets_all_of_a_run(client, server, tmp_path):
    run = LaunchedRun(server.uri, tmp_path, nproc=4, captured={"model": 10})
    _begin(client, run)
    run.wait_open()
    for rank in range(4):
        for step in range(500):
            run.log_metric(f"loss_{rank}", float(step), step, rank)
    run.log(0, params=[("lr", "0.1")], metrics=[("too far", 1.0, 1_800_000_000_000, 2**70)])
    run.write_log("hello\n")
    _end(client, run)
    stored = _stored(server, run)
    assert stored.status == "FINISHED"
    assert {key: len(values) for key, values in stored.metrics.items()} == {f"loss_{rank}": 500 for rank in range(4)}
    assert stored.params["lr"] == "0.1"
    assert stored.artifacts["logs/rank_0.out"].read_text() == "hello\n"
    assert set(stored.artifacts) == {"cell.py", "captured.json", "logs/rank_0.out"}
    assert ["too far" in sentence for sentence in run.tracked.refused] == [True]


# ------------------------------------------------------------------------------------------- servers that are no use


def test_a_silent_server_is_reported_while_it_is_silent_and_does_not_hold_up_the_end(client, tmp_path):
    with silent_server() as culprit:
        run = LaunchedRun(culprit.uri, tmp_path)
        _begin(client, run)
        assert run.wait_problem() == f"{culprit.uri}: no answer for 3.5 s."
        run.log_metric("loss", 1.0)
        _end(client, run)
        assert run.tracked.state is TrackedState.PENDING
        assert (run.path / spool_name(0)).stat().st_size > 0


def test_a_refused_connection_is_reported_with_the_address(client, tmp_path):
    with refusing_uri() as uri:
        run = LaunchedRun(uri, tmp_path)
        _begin(client, run)
        assert run.wait_problem() == f"{uri}: connection refused."
        _end(client, run)
        assert run.tracked.state is TrackedState.PENDING


@pytest.mark.parametrize(
    "status, body, expected",
    [
        (500, '{"error_code": "INTERNAL_ERROR", "message": "out of order"}', "error 500"),
        (503, "<html>Service Unavailable</html>", "error 503"),
        (401, "You are not authenticated", "You are not authenticated"),
        (403, '{"error_code": "PERMISSION_DENIED", "message": "not for you"}', "not for you"),
        (200, "<html>a proxy's login page</html>", "login page"),
    ],
)
def test_what_a_server_answers_instead_is_reported(client, tmp_path, status, body, expected):
    with failing_server(status, body) as culprit:
        run = LaunchedRun(culprit.uri, tmp_path)
        _begin(client, run)
        problem = run.wait_problem()
        assert problem.startswith(f"{culprit.uri}: ")
        assert expected in problem
        assert "\n" not in problem
        _end(client, run)


def test_a_host_that_does_not_exist_is_called_so(client, tmp_path):
    run = LaunchedRun("http://no-such-host.invalid:5000", tmp_path)
    _begin(client, run)
    assert "no such host" in run.wait_problem()
    _end(client, run)


def test_the_password_of_a_url_is_in_no_message(client, tmp_path):
    with refusing_uri() as uri:
        run = LaunchedRun(uri.replace("://", "://me:hunter2@"), tmp_path)
        _begin(client, run)
        assert "://me:***@" in run.wait_problem()
        assert "hunter2" not in (run.tracked.problem or "")
        _end(client, run)


def test_a_server_that_comes_up_while_the_run_is_on_gets_everything(client, server, tmp_path):
    with recovering_server(refuses=True) as culprit:
        run = LaunchedRun(culprit.uri, tmp_path)
        _begin(client, run)
        run.wait_problem()
        run.log_metric("loss", 1.0)
        culprit.recover(server)
        run.wait_open()
        assert run.tracked.problem is None
        _end(client, run)
        stored = _stored(server, run)
        assert (stored.status, stored.metrics) == ("FINISHED", {"loss": [(0, 1.0)]})


@pytest.mark.slow
def test_what_a_server_that_went_silent_did_not_get_can_be_sent_later(client, server, tmp_path):
    with recovering_server() as culprit:
        culprit.recover(server)
        run = LaunchedRun(culprit.uri, tmp_path, kernel=ProcessId(2**22 - 1, 1))
        _begin(client, run)
        run.wait_open()
        run.log_metric("before", 1.0)
        run.wait(lambda tracked: sum(tracked.sent) > 0)
        culprit.hang()
        run.log_metric("after", 2.0)
        assert run.wait_problem()
        _end(client, run)
        assert run.tracked.state is TrackedState.OPEN
        assert (_stored(server, run).status, set(_stored(server, run).metrics)) == ("RUNNING", {"before"})
        culprit.recover(server)
        assert eventually(lambda: "sent" in _finish(client, run), _PATIENCE_S)
        stored = _stored(server, run)
        assert (stored.status, set(stored.metrics)) == ("FINISHED", {"before", "after"})


def _finish(client: TrackingClient, run: LaunchedRun) -> str:
    outcome = client.finish([run.path], tracking_environment(), _PATIENCE_S)[run.run_id]
    return outcome if not outcome.startswith("not sent") else ""


# ------------------------------------------------------------------------------------------------------------- disks


def test_a_full_disk_under_the_store_is_a_problem_until_there_is_room(client, small_disk, tmp_path):
    uri = sqlite_store(small_disk)
    run = LaunchedRun(uri, tmp_path)
    _begin(client, run)
    run_id = run.wait_open()
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    for step in range(2000):
        run.log_metric("loss", 1.0, step)
    assert "disk" in run.wait_problem()
    ballast.unlink()
    _end(client, run)
    stored = next(stored for stored in read_runs(uri) if stored.run_id == run_id)
    assert len(stored.metrics["loss"]) == 2000
    assert run.tracked.state is TrackedState.ENDED


def test_a_directory_that_can_not_be_written_to_is_named(client, tmp_path):
    (tmp_path / "file").write_text("")
    run = LaunchedRun(f"sqlite:///{tmp_path}/file/mlflow.db", tmp_path)
    _begin(client, run)
    assert str(tmp_path / "file") in run.wait_problem()
    _end(client, run)


# ------------------------------------------------------------------------------------------------------- the kernel

_KERNEL = """
import sys, time
from pathlib import Path
from air_nb.tracking.client import TrackingClient
from tests.support.tracked_runs import LaunchedRun, tracking_environment
client = TrackingClient()
run = LaunchedRun(sys.argv[1], Path(sys.argv[2]))
client.begin(run.path, tracking_environment())
client.wait_ready(60)
print(run.path, client.pid, flush=True)
time.sleep(1000)
"""


class _Kernel:
    """A process that has launched a run, as a kernel does."""

    def __init__(self, uri: str, cwd: Path) -> None:
        command = [sys.executable, "-c", _KERNEL, uri, str(cwd)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        path, pid = self._process.stdout.readline().split()
        self.run = LaunchedRun.at(Path(path))
        process = ProcessId.of(int(pid))
        assert process is not None
        self._tracking_process = process

    def kill(self) -> None:
        self._process.kill()

    def wait_for_tracking_process(self) -> None:
        assert eventually(lambda: not self._tracking_process.is_alive(), _EXIT_S)

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def test_the_kernel_is_killed_and_the_run_is_ended_with_its_logs(tmp_path):
    uri = sqlite_store(tmp_path)
    kernel = _Kernel(uri, tmp_path)
    try:
        run = kernel.run
        run.wait_open()
        run.log_metric("loss", 1.0)
        run.write_log("the last words\n")
        kernel.kill()
        time.sleep(0.5)  # as long as the launcher may take
        run.close_record(RunState.KILLED, reason="in the launcher's words")
        kernel.wait_for_tracking_process()
    finally:
        kernel.close()
    (stored,) = read_runs(uri)
    assert stored.status == "KILLED"
    assert stored.tags["air_nb.reason"] == "in the launcher's words"
    assert stored.metrics == {"loss": [(0, 1.0)]}
    assert stored.artifacts["logs/rank_0.out"].read_text() == "the last words\n"
    assert run.tracked.state is TrackedState.ENDED


def test_kernel_and_launcher_are_killed_at_once_and_the_run_is_ended_all_the_same(tmp_path):
    uri = sqlite_store(tmp_path)
    kernel = _Kernel(uri, tmp_path)
    try:
        kernel.run.wait_open()
        kernel.kill()
        kernel.wait_for_tracking_process()
    finally:
        kernel.close()
    (stored,) = read_runs(uri)
    assert (stored.status, stored.tags["air_nb.reason"]) == ("KILLED", "the kernel ended")


def test_the_kernel_is_killed_while_a_server_is_silent_and_no_process_stays(tmp_path):
    with silent_server() as culprit:
        kernel = _Kernel(culprit.uri, tmp_path)
        try:
            kernel.run.wait_problem()
            kernel.kill()
            kernel.run.close_record(RunState.KILLED, reason="the kernel ended")
            kernel.wait_for_tracking_process()
        finally:
            kernel.close()
        assert kernel.run.tracked.state is TrackedState.PENDING


def test_a_stuck_process_does_not_hold_up_the_kernel(tmp_path):
    client = TrackingClient()
    client.start()
    assert client.wait_ready(_PATIENCE_S)
    try:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        run = LaunchedRun(sqlite_store(tmp_path), tmp_path)
        _begin(client, run, AIR_NB_TEST_BALLAST="x" * 300_000)  # more than a pipe holds
        assert "killed" in run.wait_problem()
        run.close_record()
        client.end(run.path)  # starts another one
        run.wait_ended()
    finally:
        client.close()
