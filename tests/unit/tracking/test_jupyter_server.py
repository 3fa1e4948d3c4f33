"""The process of these tests stands for a Jupyter server: both packages are in its environment."""

from __future__ import annotations

import json
import os
import time

import pytest

from air_nb.tracking.jupyter_server import find_jupyter_server
from air_nb.tracking.links import JupyterServer

pytest.importorskip("jupyter_server_proxy")

URL = "http://127.0.0.1:8888/user/alice/"


@pytest.fixture
def info_file(tmp_path, monkeypatch):
    """What a Jupyter server leaves when it starts."""
    file = tmp_path / f"jpserver-{os.getpid()}.json"
    file.write_text(json.dumps({"base_url": "/user/alice/", "url": URL, "token": "secret"}))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("JPY_PARENT_PID", str(os.getpid()))
    monkeypatch.delenv("JUPYTERHUB_PUBLIC_URL", raising=False)
    return file


def test_server_of_the_kernel_is_found_without_its_token(info_file):
    assert find_jupyter_server() == JupyterServer("/user/alice/", URL)


def test_server_of_a_hub_has_the_address_that_the_hub_gave_it(info_file, monkeypatch):
    monkeypatch.setenv("JUPYTERHUB_PUBLIC_URL", "https://hub.example.org/user/alice")
    assert find_jupyter_server() == JupyterServer("/user/alice/", "https://hub.example.org/user/alice/")


def test_server_that_was_started_before_the_packages_were_installed_opens_nothing(info_file):
    os.utime(info_file, (0, 0))
    assert find_jupyter_server() is None


def test_server_of_another_environment_opens_nothing(info_file, monkeypatch, tmp_path):
    site = tmp_path / "lib" / "site-packages"
    (site / "jupyter_server_proxy-4.4.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr("air_nb.tracking.jupyter_server._site_packages", lambda pid: [site])
    os.utime(info_file, (time.time() + 60,) * 2)
    assert find_jupyter_server() is None
    ours = site / "air_nb-0.1.0.dist-info"
    ours.mkdir()
    assert find_jupyter_server() is None  # an air_nb from before it could open anything
    (ours / "entry_points.txt").write_text("[jupyter_serverproxy_servers]\nair-nb-mlflow = air_nb:x\n")
    assert find_jupyter_server() is not None


@pytest.mark.parametrize("pid", ["", "0", "none", "-1"])
def test_kernel_that_no_jupyter_server_started_has_none(info_file, monkeypatch, pid):
    monkeypatch.setenv("JPY_PARENT_PID", pid)
    assert find_jupyter_server() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"base_url": "/"}', "\xff"])
def test_file_that_is_not_a_servers_is_no_server(info_file, text):
    info_file.write_text(text, encoding="latin-1")
    assert find_jupyter_server() is None


def test_without_jupyter_there_is_none(monkeypatch):
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert find_jupyter_server() is None
