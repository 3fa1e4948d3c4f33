"""MLflow's pages for a store on this machine: what a click starts behind Jupyter, and ``%air ui``; that it all ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil
import pytest

from air_nb.errors import PagesError
from air_nb.protocol.messages import RunState
from air_nb.protocol.tracking import REQUEST_FILE, TRACKED_FILE, TrackedRun, TrackedState
from air_nb.runs.directory import RunDirectory, RunRecord
from air_nb.runs.liveness import ProcessId
from air_nb.session.ui import MlflowPages
from air_nb.tracking.ui import MlflowServer
from tests.support.kernel import running_kernel
from tests.support.mlflow_stores import read_runs, sqlite_path, sqlite_store
from tests.support.wait import eventually

pytest.importorskip("mlflow")

HUB = "hub.example.org:8443"
START_S = 120.0
GONE_S = 5.0


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    """URI of an empty store."""
    return sqlite_store(tmp_path_factory.mktemp("store"))


def track(uri: str) -> str:
    """Make the directory of a run that is tracked in this store; returns its id."""
    directory = RunDirectory.create()
    directory.write_record(RunRecord(directory.run_id, "calm-otter-41", RunState.FINISHED, time.time(), 2, "cpu"))
    directory.write_private(REQUEST_FILE, "{}")
    directory.write_private(TRACKED_FILE, TrackedRun(TrackedState.ENDED, uri, "9ed09d3e", "0").encode())
    return directory.run_id


# ------------------------------------------------------------------------------------------------- behind Jupyter


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class OpenerProcess:
    """What jupyter-server-proxy would have started, below a process that stands for the Jupyter server."""

    def __init__(self, directory: Path) -> None:
        self._socket = directory / "socket"
        self.jupyter = subprocess.Popen(["sleep", "600"])
        jupyter = ProcessId.of(self.jupyter.pid)
        assert jupyter is not None
        command = [sys.executable, "-P", "-m", "air_nb.tracking.opener", str(self._socket)]
        self.process = subprocess.Popen([*command, str(jupyter.pid), str(jupyter.started_ticks)], cwd=directory)
        assert eventually(self._socket.exists, START_S)

    def get(self, path: str, host: str = HUB) -> tuple[int, str, str | None]:
        """Status, page and where to go instead."""
        connection = _UnixConnection(self._socket)
        try:
            connection.request("GET", path, headers={"Host": host})
            reply = connection.getresponse()
            return reply.status, reply.read().decode(), reply.getheader("Location")
        finally:
            connection.close()

    def open(self, run: str, host: str = HUB) -> tuple[int, str, str | None]:
        """What a browser gets that asks again as long as it is told to."""
        end = time.monotonic() + START_S
        while True:
            status, page, location = self.get(f"/open?run={run}", host)
            if status != HTTPStatus.ACCEPTED or time.monotonic() > end:
                return status, page, location
            assert 'http-equiv="refresh"' in page
            time.sleep(0.2)

    def servers(self) -> list[psutil.Process]:
        """All below it."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        """End both."""
        for process in (self.process, self.jupyter):
            process.kill()
            process.wait(10)


@contextmanager
def running_opener(directory: Path) -> Iterator[OpenerProcess]:
    opener = OpenerProcess(directory)
    try:
        yield opener
    finally:
        opener.close()


@pytest.fixture(scope="module")
def opener(tmp_path_factory) -> Iterator[OpenerProcess]:
    """One for the tests of this module; what it has started stays until the last of them."""
    with running_opener(tmp_path_factory.mktemp("o")) as running:
        yield running


@pytest.fixture(scope="module")
def port(opener, store) -> int:
    """Of the MLflow server of the store, after a click."""
    status, _, location = opener.open(track(store))
    assert status == HTTPStatus.FOUND
    prefix, _, rest = str(location).partition("/proxy/")
    number, _, page = rest.partition("/")
    assert (prefix, page) == ("..", "#/experiments/0/runs/9ed09d3e")
    return int(number)


def ask(port: int, path: str, host: str = HUB, origin: str | None = None, data: Any = None) -> int:
    """Status of a request as jupyter-server-proxy passes it on, with the headers of the browser."""
    headers = {"Host": host, "Content-Type": "application/json"} | ({"Origin": origin} if origin else {})
    body = None if data is None else json.dumps(data).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_click_leads_to_a_server_that_shows_the_store_under_the_name_that_the_browser_knows(port, store):
    search = {"experiment_ids": ["0"]}
    assert ask(port, "/") == HTTPStatus.OK
    assert ask(port, "/ajax-api/2.0/mlflow/runs/search", HUB, f"https://{HUB}", search) == HTTPStatus.OK
    assert ask(port, "/api/2.0/mlflow/runs/create", data={"experiment_id": "0", "run_name": "x"}) == HTTPStatus.OK
    assert [run.name for run in read_runs(store)] == ["x"]


def test_pages_from_elsewhere_reach_nothing(port):
    search = {"experiment_ids": ["0"]}
    assert ask(port, "/", "evil.example.org") == HTTPStatus.FORBIDDEN
    assert (
        ask(port, "/ajax-api/2.0/mlflow/runs/search", HUB, "https://evil.example.org", search) == HTTPStatus.FORBIDDEN
    )


def test_server_listens_on_loopback_only_and_its_store_is_not_in_its_command_line(opener, port, store):
    processes = opener.servers()
    assert len(processes) == 2, processes
    listening = [c.laddr for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", port)]
    assert not [process for process in processes if store in " ".join(process.cmdline())]


def test_second_run_of_a_store_has_the_same_server_under_any_name_of_this_machine(opener, port, store):
    again = f"../proxy/{port}/#/experiments/0/runs/9ed09d3e"
    for host in (HUB, "localhost:8888", "127.0.0.1"):
        assert opener.get(f"/open?run={track(store)}", host)[::2] == (HTTPStatus.FOUND, again)
    assert len(opener.servers()) == 2


@pytest.mark.parametrize("host", ["", "a,b", "*", "a/b", "a:b", "a b"])
def test_what_is_no_host_is_refused(opener, host):
    assert opener.get(f"/open?run={track('sqlite:////a.db')}", host)[0] == HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize("path", ["/", "/open", "/open?run=", "/open?run=a&run=b", "/x?run=a", "/open?run=nobody"])
def test_what_is_no_run_is_not_found(opener, path):
    status, page, _ = opener.get(path)
    assert status == HTTPStatus.NOT_FOUND
    assert "</html>" in page


def test_store_that_mlflow_cannot_read_shows_its_last_words_and_the_next_click_tries_again(tmp_path_factory, tmp_path):
    broken = tmp_path / "mlflow.db"
    broken.write_text("this is <no> database " * 1000)
    with running_opener(tmp_path_factory.mktemp("o")) as opener:
        run = track(f"sqlite:///{broken}")
        status, page, _ = opener.open(run)
        assert status == HTTPStatus.INTERNAL_SERVER_ERROR
        assert "file is not a database" in page
        assert "`%air ui`" in page
        sqlite_store(tmp_path)
        assert opener.get(f"/open?run={run}")[0] == HTTPStatus.ACCEPTED


@pytest.mark.parametrize("victim", ["jupyter", "process"])
def test_all_ends_when_jupyter_or_the_opener_is_killed(victim, store, tmp_path_factory):
    with running_opener(tmp_path_factory.mktemp("o")) as opener:
        assert opener.get(f"/open?run={track(store)}")[0] == HTTPStatus.ACCEPTED
        assert eventually(lambda: len(opener.servers()) == 2, START_S)
        everything = [psutil.Process(opener.process.pid), *opener.servers()]
        getattr(opener, victim).kill()
        getattr(opener, victim).wait(10)
        _, alive = psutil.wait_procs([process for process in everything if process.is_running()], GONE_S)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_server_that_was_killed_is_started_again_by_the_next_click(store, tmp_path_factory):
    with running_opener(tmp_path_factory.mktemp("o")) as opener:
        run = track(store)
        assert opener.open(run)[0] == HTTPStatus.FOUND
        first, server = opener.servers()
        for process in (server, first):
            process.kill()
        assert eventually(lambda: not server.is_running())
        status, _, location = opener.open(run)
        assert status == HTTPStatus.FOUND
        assert ask(int(str(location).split("/")[2]), "/") == HTTPStatus.OK


def test_ctrl_c_in_the_terminal_of_jupyter_ends_nothing(opener, port):
    os.kill(opener.process.pid, signal.SIGINT)
    assert opener.get("/")[0] == HTTPStatus.NOT_FOUND
    assert len(opener.servers()) == 2


# ------------------------------------------------------------------------------------------------------- %air ui


def test_air_ui_serves_the_store_says_so_and_ends_with_the_kernel(store, tmp_path):
    with running_kernel(tmp_path, load=False) as kernel:
        kernel.ok("from air_nb.session.ui import MlflowPages, ui_text\npages = MlflowPages()")
        shown = (
            kernel.ok(f"text = ui_text(pages, {store!r}, print); print(text)", START_S).stream("stdout").splitlines()
        )
        assert shown[0].startswith("MLflow is starting")
        url = shown[-2].removeprefix("MLflow: ")
        with urllib.request.urlopen(url) as page:
            assert page.status == HTTPStatus.OK
        assert kernel.value(f"pages.url({store!r}, print)") == repr(url)
        processes = kernel.descendants()
        assert len(processes) == 2, processes
        # A child that the user's code forks has no share in the server's life.
        kernel.ok("import os, time\nif os.fork() == 0:\n    time.sleep(2)\n    os._exit(0)")
        kernel.interrupt()
        assert kernel.value("'mlflow' in __import__('sys').modules") == "False"
        kernel.kill()
        _, alive = psutil.wait_procs(processes, GONE_S)
        assert alive == []


def test_air_ui_says_why_a_store_can_not_be_shown_and_leaves_nothing(tmp_path):
    broken = tmp_path / "mlflow.db"
    broken.write_text("this is no database " * 1000)
    pages = MlflowPages()
    try:
        with pytest.raises(PagesError, match="file is not a database"):
            pages.url(f"sqlite:///{broken}", lambda text: None)
    finally:
        pages.close()


def test_settings_and_files_of_the_user_do_not_keep_the_server_from_starting(store, monkeypatch, tmp_path):
    for name in ("MLFLOW_GUNICORN_OPTS", "MLFLOW_STATIC_PREFIX", "MLFLOW_SERVER_ALLOWED_HOSTS"):
        monkeypatch.setenv(name, "/elsewhere")
    for name in ("random.py", "flask.py"):
        (tmp_path / name).write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    server = MlflowServer(store)
    try:
        assert eventually(lambda: server.is_ready() or server.ending() is not None, START_S)
        assert server.ending() is None
        assert ask(server.port, "/", f"localhost:{server.port}") == HTTPStatus.OK
    finally:
        server.close()
    assert server.ending() is not None
    assert sqlite_path(store).exists()
