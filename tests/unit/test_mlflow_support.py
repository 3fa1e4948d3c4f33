"""The tracking servers and stores that other tests stand on are what they claim to be."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mlflow_servers import (
    MlflowServer,
    failing_server,
    real_server,
    recovering_server,
    refusing_uri,
    silent_server,
)
from tests.support.mlflow_stores import read_runs, sqlite_store

_LOG = """
import sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
mlflow.set_experiment("fruit")
with mlflow.start_run(run_name="outer", tags={"color": "red"}):
    mlflow.log_param("lr", 0.5)
    for step in (0, 2):
        mlflow.log_metric("loss", step / 4, step=step)
    mlflow.log_text("hello", "notes/note.txt")
    mlflow.start_run(run_name="inner", nested=True)
    mlflow.end_run("FAILED")
with mlflow.start_run(run_name="deleted") as run:
    pass
mlflow.delete_run(run.info.run_id)
mlflow.start_run(experiment_id="0", run_name="left open")
sys.stdout.flush()
__import__("os")._exit(0)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, test_environment) -> Iterator[MlflowServer]:
    with real_server(tmp_path_factory.mktemp("server")) as running:
        yield running


def _get(uri: str, timeout_s: float = 5.0) -> bytes:
    with urllib.request.urlopen(f"{uri}/health", timeout=timeout_s) as answer:
        return bytes(answer.read())


def _post(uri: str, call: str, **values: Any) -> Any:
    request = urllib.request.Request(
        f"{uri}/api/2.0/mlflow/{call}", json.dumps(values).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_what_mlflow_logs_into_a_copied_store_is_read_back(tmp_path: Path):
    uri = sqlite_store(tmp_path)
    subprocess.run([sys.executable, "-c", _LOG, uri], cwd=tmp_path, check=True, timeout=120, capture_output=True)
    outer, inner, left_open = read_runs(uri)
    assert (outer.name, outer.status, outer.experiment, outer.parent) == ("outer", "FINISHED", "fruit", None)
    assert (outer.params, outer.tags["color"]) == ({"lr": "0.5"}, "red")
    assert outer.metrics == {"loss": [(0, 0.0), (2, 0.5)]}
    assert outer.artifacts["notes/note.txt"].read_text() == "hello"
    assert (inner.name, inner.status, inner.parent) == ("inner", "FAILED", outer.run_id)
    assert (left_open.status, left_open.experiment, left_open.ended_at) == ("RUNNING", "Default", None)
    assert left_open.artifact_root.is_relative_to(tmp_path)


def test_stores_are_apart(tmp_path: Path):
    uris = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        uris.append(sqlite_store(tmp_path / name))
    assert uris[0] != uris[1]
    assert [read_runs(uri) for uri in uris] == [[], []]


def test_a_real_server_keeps_runs_in_its_store(server: MlflowServer):
    run = _post(server.uri, "runs/create", experiment_id="0", run_name="by hand", start_time=1)["run"]["info"]
    _post(server.uri, "runs/log-metric", run_id=run["run_id"], key="x", value=1.5, timestamp=1, step=3)
    stored = next(stored for stored in read_runs(server.store_uri) if stored.run_id == run["run_id"])
    assert (stored.name, stored.metrics) == ("by hand", {"x": [(3, 1.5)]})


def test_a_server_that_keeps_artifacts_has_them_beside_its_store(server: MlflowServer):
    experiment_id = _post(server.uri, "experiments/create", name="served")["experiment_id"]
    run = _post(server.uri, "runs/create", experiment_id=experiment_id, start_time=2)["run"]["info"]
    path = run["artifact_uri"].removeprefix("mlflow-artifacts:")
    upload = urllib.request.Request(
        f"{server.uri}/api/2.0/mlflow-artifacts/artifacts{path}/note.txt", b"hello", method="PUT"
    )
    urllib.request.urlopen(upload, timeout=30).close()
    stored = next(stored for stored in read_runs(server.store_uri) if stored.run_id == run["run_id"])
    assert stored.artifacts["note.txt"].read_text() == "hello"


def test_a_silent_server_accepts_and_never_answers():
    with silent_server() as culprit:
        with pytest.raises(TimeoutError):
            _get(culprit.uri, timeout_s=0.3)
        assert culprit.connections == 1


def test_a_refusing_uri_refuses_and_keeps_its_port():
    with refusing_uri() as uri:
        with pytest.raises(urllib.error.URLError, match="Connection refused"):
            _get(uri)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(uri.rpartition(":")[2])))


@pytest.mark.parametrize("status, body", [(500, '{"message": "no"}'), (401, "<html>who are you?</html>")])
def test_a_failing_server_answers_everything_with_its_status(status: int, body: str):
    with failing_server(status, body) as culprit:
        with pytest.raises(urllib.error.HTTPError) as failure:
            _post(culprit.uri, "runs/log-batch", filler="x" * 2_000_000)  # more than the sockets hold
        with failure.value as answer:
            assert (answer.code, answer.read().decode()) == (status, body)
        assert ("html" in answer.headers["Content-Type"]) == body.startswith("<")
        assert culprit.requests == ["POST /api/2.0/mlflow/runs/log-batch HTTP/1.1"]


@pytest.mark.parametrize("refuses, first", [(True, urllib.error.URLError), (False, TimeoutError)])
def test_a_recovering_server_becomes_a_real_one_and_may_hang_again(
    server: MlflowServer, *, refuses: bool, first: type[Exception]
):
    with recovering_server(refuses=refuses) as culprit:
        with pytest.raises(first):
            _get(culprit.uri, timeout_s=0.3)
        culprit.recover(server)
        assert _get(culprit.uri) == b"OK"
        culprit.hang()
        with pytest.raises(TimeoutError):
            _get(culprit.uri, timeout_s=0.3)
