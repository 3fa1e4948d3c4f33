from __future__ import annotations

import pytest

from air_nb.protocol.tracking import TrackedRun, TrackedState
from air_nb.tracking.links import JupyterServer, Link, is_database, is_server, run_page

ALICE = JupyterServer("/user/alice/", "http://127.0.0.1:8888/user/alice/")


def tracked(uri: str, run: str | None = "9ed09d3e", experiment: str | None = "7") -> TrackedRun:
    return TrackedRun(TrackedState.OPEN, uri, run, experiment, "training")


@pytest.mark.parametrize("server", [None, ALICE])
@pytest.mark.parametrize(
    "uri,root",
    [
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("https://mlflow.example.org/", "https://mlflow.example.org"),
        ("https://example.org/team/mlflow/", "https://example.org/team/mlflow"),
    ],
)
def test_run_of_a_server_is_on_that_server_wherever_the_kernel_runs(uri, root, server):
    url = f"{root}/#/experiments/7/runs/9ed09d3e"
    assert run_page(tracked(uri), "20260101-000000-abcd", server) == Link(url, url)


def test_name_and_password_in_the_uri_are_not_shown():
    link = run_page(tracked("https://me:s3cr%40t@example.org:8443/x?token=abc#f"), "r", None)
    assert link is not None
    assert link.text == link.href == "https://example.org:8443/x/#/experiments/7/runs/9ed09d3e"


@pytest.mark.parametrize("uri", ["sqlite:////home/a/mlflow.db", "postgresql+psycopg2://u:p@db/x", "file:///a", "/a/b"])
def test_run_of_a_database_is_opened_by_the_jupyter_server(uri):
    path = "air-nb-mlflow/open?run=20260101-000000-abcd"
    link = run_page(tracked(uri), "20260101-000000-abcd", ALICE)
    assert link == Link(f"http://127.0.0.1:8888/user/alice/{path}", f"/user/alice/{path}")


def test_run_of_a_database_without_a_jupyter_server_is_what_air_ui_shows():
    assert run_page(tracked("sqlite:////home/a/mlflow.db"), "r", None) == Link("%air ui")


@pytest.mark.parametrize("uri", ["databricks", "databricks://profile", "arn:aws:sagemaker:x", "plugin://host"])
def test_pages_that_others_know_how_to_find_are_not_guessed(uri):
    assert run_page(tracked(uri), "r", ALICE) is None
    assert not is_server(uri)
    assert not is_database(uri)


def test_run_that_is_not_in_mlflow_yet_has_no_page():
    assert run_page(tracked("http://h", None, None), "r", ALICE) is None
    assert run_page(tracked("sqlite:////a.db", None, None), "r", ALICE) is None


def test_ids_are_quoted():
    link = run_page(tracked("http://h", 'a"/<b>', "1&2"), "r", None)
    assert link is not None
    assert link.text == "http://h/#/experiments/1%262/runs/a%22%2F%3Cb%3E"
    link = run_page(tracked("sqlite:////a.db"), 'x"&y', ALICE)
    assert link is not None
    assert link.href == "/user/alice/air-nb-mlflow/open?run=x%22%26y"
