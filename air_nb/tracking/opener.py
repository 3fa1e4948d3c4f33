"""What a click on a run's link reaches: ``<base_url>air-nb-mlflow/open?run=<run id>``, behind Jupyter's authentication.

jupyter-server-proxy starts this process on the first click, as a child of the Jupyter server, and talks to it through a
private socket. It starts an ``mlflow server`` for the store of the run (one per store), says so until that answers, and
sends the browser to the run's page at ``<base_url>proxy/<port>/``. Addresses are relative: a hub's are right too.

A link names a run, never a store: a page from elsewhere can't have a database of its choice opened. Requests come on
threads of the standard library's server; ``Opener`` has a lock. Nothing here imports Jupyter or MLflow.
"""

from __future__ import annotations

import html
import importlib.util
import os
import re
import signal
import socketserver
import sys
import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from air_nb.protocol.tracking import TrackedRun
from air_nb.runs.directory import RunDirectory, RunRecord, find_run
from air_nb.runs.liveness import ProcessId, call_when_gone
from air_nb.runs.paths import home_path
from air_nb.runs.unsent import is_tracked, read_tracked
from air_nb.tracking.links import UI_COMMAND, is_database, page_of, run_page
from air_nb.tracking.ui import MlflowServer

__all__ = ["Opener", "Reply", "describe", "main"]

_HOST_HEADER = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?", re.ASCII)
_REFRESH_S = 1

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{refresh}<title>{title}</title>
<style>
  :root {{ color-scheme: light dark }}
  body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 48rem; margin: 15vh auto; padding: 0 1rem }}
  h1 {{ font-size: 1.3rem; font-weight: 600 }}
  p {{ white-space: pre-wrap; overflow-wrap: anywhere }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{text}</p>
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to a browser.

    Attributes:
        status: Of HTTP.
        title: What is the case.
        text: More about it.
        location: Where to go instead.
        again: Whether the browser should ask again after a second.
    """

    status: HTTPStatus
    title: str = ""
    text: str = ""
    location: str | None = None
    again: bool = False

    @property
    def body(self) -> bytes:
        """As a page."""
        refresh = f'<meta http-equiv="refresh" content="{_REFRESH_S}">\n' if self.again else ""
        return _PAGE.format(refresh=refresh, title=html.escape(self.title), text=html.escape(self.text)).encode()


class Opener:
    """Knows what to answer; owns the MLflow servers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[str, MlflowServer] = {}

    def open(self, run: str, host: str) -> Reply:
        """Answer a click.

        Args:
            run: Id of the run.
            host: By which name the browser knows the Jupyter server (``Host`` header).
        """
        try:
            directory, record = find_run(run)
        except LookupError:
            return Reply(
                HTTPStatus.NOT_FOUND,
                f"There is no run {run}",
                "It was not made on this machine by this user, or its directory has been deleted: the newest 50 of "
                f"the last 30 days are kept, in {home_path()}. "
                f"What it logged is still in MLflow: `{UI_COMMAND}` in a notebook shows it.",
            )
        tracked = read_tracked(directory.path)
        if tracked is None or page_of(tracked) is None:
            return _not_tracked(directory, record, tracked)
        if not is_database(tracked.tracking_uri):
            link = run_page(tracked, run, None)
            if link is None:
                return Reply(HTTPStatus.NOT_FOUND, "This run has no page here", f"It is at {tracked.tracking_uri}.")
            return Reply(HTTPStatus.FOUND, location=link.href)
        return self._open_database(tracked, record.name, host)

    def close(self) -> None:
        """End all servers."""
        with self._lock:
            for server in self._servers.values():
                server.close()
            self._servers.clear()

    def _open_database(self, tracked: TrackedRun, name: str, host: str) -> Reply:
        if importlib.util.find_spec("mlflow") is None:
            text = f"Install it where Jupyter runs:\n{sys.executable} -m pip install 'mlflow>=3.7'\n\n{_ELSEWHERE}"
            return Reply(HTTPStatus.NOT_IMPLEMENTED, "MLflow is not installed in Jupyter's environment", text)
        with self._lock:
            try:
                server = self._server_for(tracked.tracking_uri, host)
            except OSError as error:
                return Reply(HTTPStatus.INTERNAL_SERVER_ERROR, "MLflow can't be started", f"{error}\n\n{_ELSEWHERE}")
            ending = server.ending()
            if ending is not None:
                self._servers.pop(tracked.tracking_uri).close()  # the next click tries again
                return Reply(HTTPStatus.INTERNAL_SERVER_ERROR, "MLflow has ended", f"{ending}\n\n{_ELSEWHERE}")
            if server.is_ready():
                return Reply(HTTPStatus.FOUND, location=f"../proxy/{server.port}/{page_of(tracked)}")
        return Reply(HTTPStatus.ACCEPTED, "MLflow is starting", f"In some ten seconds it shows run {name}.", again=True)

    def _server_for(self, tracking_uri: str, host: str) -> MlflowServer:
        """The store's server, which must accept this host: started, or started again."""
        server = self._servers.get(tracking_uri)
        if server is not None and server.was_ready and server.ending() is not None:
            server.close()  # it did work, then somebody killed it: out of memory, say
            server = None
        if server is not None and server.accepts(host):
            return server
        hosts = {host}
        if server is not None:
            hosts |= server.hosts
            server.close()
        self._servers[tracking_uri] = server = MlflowServer(tracking_uri, hosts)
        return server


_ELSEWHERE = f"`{UI_COMMAND}` in the notebook starts MLflow from the kernel instead."


def _not_tracked(directory: RunDirectory, record: RunRecord, tracked: TrackedRun | None) -> Reply:
    if not is_tracked(directory):
        return Reply(
            HTTPStatus.NOT_FOUND,
            f"Run {record.name} is not tracked",
            "It was started with --no-mlflow, or MLflow was not installed in the environment of its kernel.",
        )
    if tracked is not None and tracked.problem:
        return Reply(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"Run {record.name} has not reached MLflow yet",
            f"{tracked.problem}\n\n`%air runs --upload {record.name}` in a notebook sends what was kept.",
        )
    return Reply(HTTPStatus.ACCEPTED, f"Run {record.name} is not in MLflow yet", "This takes a moment.", again=True)


class _SocketServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: str, opener: Opener) -> None:
        self.opener = opener
        Path(path).unlink(missing_ok=True)  # of a predecessor that was killed
        super().__init__(path, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _SocketServer

    def do_GET(self) -> None:
        try:
            reply = self._reply()
        except Exception as error:  # noqa: BLE001 - the border: who clicked is told
            reply = Reply(
                HTTPStatus.INTERNAL_SERVER_ERROR, "The run can't be opened", f"{type(error).__name__}: {error}"
            )
        self.send_response(reply.status)
        if reply.location is not None:
            self.send_header("Location", reply.location)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if reply.location is None:
            self.wfile.write(reply.body)

    def _reply(self) -> Reply:
        host = self.headers.get("Host", "")
        address = urlsplit(self.path)
        runs = parse_qs(address.query).get("run", [])
        if not _HOST_HEADER.fullmatch(host):
            return Reply(HTTPStatus.BAD_REQUEST, "This is no Host header", host)
        if address.path != "/open" or len(runs) != 1:
            return Reply(HTTPStatus.NOT_FOUND, "There is nothing here", "A run's page is at open?run=RUN_ID.")
        return self.server.opener.open(runs[0], host)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the standard library's name
        """Not into Jupyter's log: jupyter-server-proxy is asked for every request already."""


def describe() -> dict[str, Any]:
    """What jupyter-server-proxy should start; called in the Jupyter server (entry point ``air-nb-mlflow``)."""
    jupyter = ProcessId.own()
    return {
        "command": [
            *(sys.executable, "-P", "-m", "air_nb.tracking.opener"),
            *("{unix_socket}", str(jupyter.pid), str(jupyter.started_ticks)),
        ],
        "unix_socket": True,  # in a directory of its own: nobody else on this machine can ask
        "timeout": 60,
        "launcher_entry": {"enabled": False},  # there is nothing to see without a run
    }


def main(path: str, jupyter: ProcessId) -> None:
    """Serve until the Jupyter server is gone.

    Args:
        path: Of the socket.
        jupyter: The Jupyter server.
    """
    # Ctrl-C in Jupyter's terminal reaches this process too, and Jupyter may only ask whether it is meant.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lifeline, _held = os.pipe()  # never ends: jupyter-server-proxy gives its children no pipe, the pidfd has to do
    call_when_gone(jupyter, lifeline, lambda: os._exit(0), name="air_nb-opener-lifeline")
    with _SocketServer(path, Opener()) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], ProcessId(int(sys.argv[2]), int(sys.argv[3])))
