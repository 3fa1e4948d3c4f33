"""What a click is told when there is no page to go to. With a server: ``tests/integration/test_tracking_ui.py``."""

from __future__ import annotations

import time
from http import HTTPStatus

import pytest

from air_nb.protocol.messages import RunState
from air_nb.protocol.tracking import REQUEST_FILE, TRACKED_FILE, TrackedRun, TrackedState
from air_nb.runs.directory import RunDirectory, RunRecord
from air_nb.tracking.opener import Opener, Reply, describe
from air_nb.tracking.ui import MlflowServer


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Directory of a run that has ended."""
    monkeypatch.setenv("AIR_NB_HOME", str(tmp_path / "home"))
    directory = RunDirectory.create()
    directory.write_record(RunRecord(directory.run_id, "calm-otter-41", RunState.FINISHED, time.time(), 2, "cpu"))
    return directory


@pytest.fixture
def click(monkeypatch, run):
    def no_server(*_):
        raise AssertionError("a server would be started")

    monkeypatch.setattr(MlflowServer, "__init__", no_server)
    return lambda run_id=run.run_id: Opener().open(run_id, "localhost:8888")


def track(run: RunDirectory, uri: str, mlflow_run_id: str | None = "9ed09d3e", problem: str | None = None) -> None:
    run.write_private(REQUEST_FILE, "{}")
    state = TrackedState.PENDING if mlflow_run_id is None else TrackedState.OPEN
    tracked = TrackedRun(state, uri, mlflow_run_id, mlflow_run_id and "7", problem=problem)
    run.write_private(TRACKED_FILE, tracked.encode())


def test_unknown_run_is_not_found_and_its_id_is_escaped(click):
    reply = click("x<script>")
    assert reply.status == 404
    assert b"x&lt;script&gt;" in reply.body
    assert b"<script>" not in reply.body


def test_run_without_mlflow_is_not_tracked(click):
    reply = click()
    assert (reply.status, reply.again) == (404, False)
    assert reply.title == "Run calm-otter-41 is not tracked"


def test_run_that_is_being_made_is_waited_for(click, run):
    run.write_private(REQUEST_FILE, "{}")
    assert (click().status, click().again) == (202, True)
    track(run, "sqlite:////a.db", None)
    assert (click().status, click().again) == (202, True)


def test_run_that_could_not_be_sent_says_why_and_how_to_send_it(click, run):
    track(run, "sqlite:////a.db", None, "database <disk> is full.")
    reply = click()
    assert (reply.status, reply.again) == (503, False)
    assert b"database &lt;disk&gt; is full." in reply.body
    assert "%air runs --upload calm-otter-41" in reply.text


def test_run_of_a_tracking_server_is_there(click, run):
    track(run, "https://me:secret@mlflow.example.org")
    reply = click()
    assert (reply.status, reply.location) == (302, "https://mlflow.example.org/#/experiments/7/runs/9ed09d3e")


def test_run_of_a_service_without_a_page_that_we_know_says_where_it_is(click, run):
    track(run, "databricks://profile")
    assert (click().status, click().location) == (404, None)
    assert "databricks://profile" in click().text


def test_mlflow_missing_in_jupyters_environment_says_where_to_install_it(click, run, monkeypatch):
    track(run, "sqlite:////a.db")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reply = click()
    assert reply.status == 501
    assert "-m pip install" in reply.text


def test_a_page_asks_again_only_if_told_to():
    assert b'http-equiv="refresh"' in Reply(HTTPStatus.ACCEPTED, "t", again=True).body
    assert b'http-equiv="refresh"' not in Reply(HTTPStatus.NOT_FOUND, "t").body


def test_what_jupyter_server_proxy_is_given_has_no_braces_but_the_sockets():
    config = describe()
    assert [part for part in config["command"] if "{" in part] == ["{unix_socket}"]
    assert config["unix_socket"] is True
