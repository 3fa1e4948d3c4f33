from __future__ import annotations

from pathlib import Path

import pytest

from air_nb.protocol.tracking import REQUEST_FILE, TrackedState, TrackingRequest
from air_nb.runs.directory import RunDirectory
from air_nb.runs.unsent import read_tracked
from air_nb.tracking import client as client_module
from air_nb.tracking.client import TrackingClient
from tests.support.wait import eventually

_PATIENCE_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    RunDirectory(tmp_path).write_private(REQUEST_FILE, TrackingRequest("calm-otter-41", "http://server").encode())
    return tmp_path


def _problem(path: Path) -> str:
    tracked = read_tracked(path)
    assert tracked is not None
    assert tracked.state is TrackedState.PENDING
    return tracked.problem or ""


def test_nothing_is_started_before_it_is_asked_for():
    client = TrackingClient()
    assert client.pid is None
    client.close()


def test_a_closed_client_says_why_a_run_is_not_tracked(path):
    client = TrackingClient()
    client.close()
    client.start()
    client.begin(path, {})
    assert client.pid is None
    assert _problem(path) == "the session was closed."
    assert client.wait_ended(path, 0)


def test_a_process_that_can_not_be_started_is_the_problem_of_the_run_and_no_exception(path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    client = TrackingClient()
    client.start()
    client.begin(path, {})
    assert "/nowhere/python" in _problem(path)
    client.end(path)
    assert client.finish([path], {}, _PATIENCE_S)[path.name].startswith("not sent: ")
    client.close()


def test_a_process_that_dies_each_time_is_not_started_for_ever(path, monkeypatch):
    monkeypatch.setattr(client_module, "_BOOT", "raise SystemExit(7)")
    client = TrackingClient()
    client.begin(path, {})
    assert eventually(lambda: read_tracked(path) is not None, _PATIENCE_S)
    assert "exit status 7" in _problem(path) or "died twice" in _problem(path)
    assert client.wait_ended(path, _PATIENCE_S)
    client.close()


def test_the_end_of_a_run_that_was_never_begun_is_no_error(path):
    client = TrackingClient()
    client.end(path)
    assert client.wait_ended(path, 0)
    assert client.pid is None
    client.close()
