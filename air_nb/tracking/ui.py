"""Runs ``mlflow server`` for one store, on a free loopback port, as a child that can't outlive this process.

Used by the kernel (``%air ui``) and by what jupyter-server-proxy starts (``air_nb.tracking.opener``). The child is this
module's ``main``: it ties its whole process group to its parent, then becomes MLflow's own command.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from air_nb.runs.forked import abandon_in_children
from air_nb.runs.liveness import ProcessId, call_when_gone

__all__ = ["MlflowServer", "main"]

_HOST = "127.0.0.1"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_OWN_HOSTS = ("localhost", "localhost:*", "127.0.0.1", "127.0.0.1:*", "[::1]", "[[]::1]:*")
_KILL_TIMEOUT_S = 5.0
_LAST_LINES = 20

# Of a server that somebody else runs with this environment; they would make ours another one, or keep it from starting.
_FOREIGN_SETTINGS = frozenset(
    "MLFLOW_STATIC_PREFIX MLFLOW_GUNICORN_OPTS MLFLOW_WAITRESS_OPTS MLFLOW_UVICORN_OPTS MLFLOW_ARTIFACTS_ONLY "
    "MLFLOW_SERVER_ALLOWED_HOSTS MLFLOW_SERVER_CORS_ALLOWED_ORIGINS MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE".split()
)

# As the sampling process is started: this very package however it was found, and no module from the current directory.
_MAIN = """\
import sys
sys.path.append(sys.argv[1])
from air_nb.tracking.ui import main
main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
"""


class MlflowServer:
    """One server process and its log. Thread-safe, apart from ``close``.

    Args:
        tracking_uri: The store. It goes by the environment: a command line, with a password, can be read by anybody.
        hosts: Names, with their ports, by which browsers reach it through a proxy: values of ``Host`` headers. MLflow
            refuses all others, because a foreign page could otherwise reach it by a name of its own (DNS rebinding).

    Raises:
        OSError: It can't be started.
    """

    def __init__(self, tracking_uri: str, hosts: Iterable[str] = ()) -> None:
        self.hosts = frozenset(hosts)
        self.port = _free_port()
        self._lock = threading.Lock()
        self._ready = False
        self._ending: str | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._popen = self._start(tracking_uri)
        except OSError:
            self._log.close()
            raise
        abandon_in_children(self)

    def _start(self, tracking_uri: str) -> subprocess.Popen[bytes]:
        parent = ProcessId.own()
        root = str(Path(__file__).parents[2])
        return subprocess.Popen(
            [
                *(sys.executable, "-P", "-c", _MAIN, root, str(parent.pid), str(parent.started_ticks)),
                *_arguments(tracking_uri, self.port, self.hosts),
            ],
            stdin=subprocess.PIPE,  # the lifeline: nothing is ever written
            stdout=self._log,
            stderr=self._log,
            env=_environment(tracking_uri),
            cwd="/",  # uvicorn imports from the current directory: a random.py of the user's must not be there
            start_new_session=True,  # interrupts are not for it, and its process group is ours to kill
        )

    @property
    def url(self) -> str:
        """Its root, for browsers on this machine."""
        return f"http://{_HOST}:{self.port}/"

    def accepts(self, host: str) -> bool:
        """Whether it answers a browser that knows it by this name (``Host`` header)."""
        return host in self.hosts or urlsplit(f"//{host}").hostname in _LOOPBACK

    @property
    def was_ready(self) -> bool:
        """Whether it has been seen to answer."""
        return self._ready

    def is_ready(self) -> bool:
        """Whether it answers by now. It takes 5 to 15 s."""
        with self._lock:
            self._ready = self._ready or (self._ending is None and self._listens())
            return self._ready

    def ending(self) -> str | None:
        """How it ended, with its last words; None while it runs."""
        with self._lock:
            if self._ending is None and self._has_ended():
                self._ending = f"`mlflow server` ended with status {self._popen.returncode}.\n{self._last_words()}"
            return self._ending

    def close(self) -> None:
        """End it; can be called twice."""
        with self._lock:
            if self._ending is None and not self._has_ended():
                self._kill()
            self._ending = self._ending or "it was closed"
            self._close_files()

    def abandon(self) -> None:
        """In a forked child: let go of the lifeline."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._ending = "it is the parent's"
        self._close_files()

    def _listens(self) -> bool:
        """Whether one of its processes has the port: between our looking for it and now, anybody may have taken it."""
        with suppress(psutil.Error):
            first = psutil.Process(self._popen.pid)
            return any(_has_port(process, self.port) for process in [first, *first.children(recursive=True)])
        return False

    def _has_ended(self) -> bool:
        """Whether its first process has; what is left of the others is then killed."""
        try:
            # Not reaped by this, so that its process group can't become another's before it is killed.
            if os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
        except ChildProcessError:  # reaped by an os.wait() of the user's code: the group may be anybody's by now
            self._popen.poll()
            return True
        self._kill()
        return True

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_KILL_TIMEOUT_S)

    def _last_words(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), 16384, max(size - 16384, 0)).decode(errors="replace")
        return "\n".join(tail.strip().splitlines()[-_LAST_LINES:])

    def _close_files(self) -> None:
        self._log.close()
        if self._popen.stdin is not None:
            self._popen.stdin.close()


def main(parent_pid: int, parent_ticks: int, arguments: list[str]) -> None:
    """Be ``mlflow server``, until the parent is gone.

    Args:
        parent_pid: Process id of the parent.
        parent_ticks: Its start time, as of ``air_nb.runs.liveness.ProcessId``.
        arguments: Of ``mlflow server``.
    """
    parent = ProcessId(parent_pid, parent_ticks)
    call_when_gone(parent, sys.stdin.fileno(), lambda: os.killpg(0, signal.SIGKILL), name="air_nb-ui-lifeline")
    sys.argv = ["mlflow", "server", *arguments]
    runpy.run_module("mlflow", run_name="__main__", alter_sys=True)


def _arguments(tracking_uri: str, port: int, hosts: frozenset[str]) -> list[str]:
    origins = [f"{scheme}://{host}" for host in sorted(hosts) for scheme in ("http", "https")]
    folder = _folder(tracking_uri)
    return [
        *("--host", _HOST, "--port", str(port), "--workers", "1"),  # 4 of them otherwise, with 0.2 GB each
        *("--uvicorn-opts", "--log-level warning"),
        *("--allowed-hosts", ",".join([*_OWN_HOSTS, *sorted(hosts)])),
        *(["--cors-allowed-origins", ",".join(origins)] if origins else []),
        # Where it would be for `mlflow server` in the folder of the store.
        *(["--artifacts-destination", str(folder / "mlartifacts")] if folder else []),
    ]


def _environment(tracking_uri: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN_SETTINGS}
    return kept | {
        "MLFLOW_BACKEND_STORE_URI": tracking_uri,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # 8 processes more, and a core for a while
    }


def _folder(tracking_uri: str) -> Path | None:
    """Of a store that is a file or a directory."""
    if tracking_uri.startswith("sqlite:///"):
        return Path(tracking_uri.removeprefix("sqlite:///")).parent
    parts = urlsplit(tracking_uri)
    return Path(parts.path).parent if parts.scheme in {"", "file"} else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _has_port(process: psutil.Process, port: int) -> bool:
    with suppress(psutil.Error):  # ended meanwhile
        return any(
            held.status == psutil.CONN_LISTEN and held.laddr.port == port for held in process.net_connections("tcp4")
        )
    return False
