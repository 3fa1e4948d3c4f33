"""What ``%air ui`` answers without a server of ours. With one: ``tests/integration/test_tracking_ui.py``."""

from __future__ import annotations

import pytest

from air_nb.errors import PagesError
from air_nb.session.ui import MlflowPages, ui_text


class PagesThatAreThere(MlflowPages):
    def url(self, tracking_uri, say):
        return "http://127.0.0.1:5001/"


def no_news(text):
    raise AssertionError(f"nothing is waited for, but: {text}")


def test_tracking_server_is_its_own_page_and_its_password_is_not_shown():
    assert ui_text(MlflowPages(), "https://me:secret@mlflow.example.org", no_news) == (
        "MLflow: https://mlflow.example.org/"
    )


def test_service_that_mlflow_cannot_serve_is_refused():
    with pytest.raises(PagesError, match="databricks"):
        ui_text(MlflowPages(), "databricks", no_news)


def test_mlflow_missing_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PagesError, match=r"pip install 'air_nb\[mlflow\]'"):
        ui_text(MlflowPages(), "sqlite:////a/mlflow.db", no_news)


def test_text_says_how_long_it_is_there_and_how_to_reach_it_from_elsewhere(monkeypatch):
    monkeypatch.delenv("JUPYTERHUB_SERVICE_PREFIX", raising=False)
    first, second = ui_text(PagesThatAreThere(), "sqlite:////a/mlflow.db", no_news).splitlines()
    assert first == "MLflow: http://127.0.0.1:5001/"
    assert "until this kernel ends" in second
    assert "ssh -L 127.0.0.1:5001:127.0.0.1:5001 HOST" in second


def test_on_a_hub_it_says_what_opens_the_links_of_runs(monkeypatch):
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/alice/")
    assert "air_nb[mlflow]" in ui_text(PagesThatAreThere(), "sqlite:////a/mlflow.db", no_news)
