"""A Jupyter server of its own for whatever is measured in one: its kernel, its WebSockets, its CPU time."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import websocket

from tests.support.wait import eventually

__all__ = ["JupyterServer", "Listener", "cpu_s", "sampling_process"]

_START_S = 90.0
_ANSWER_S = 60.0
_QUIET_SHARE = 0.05  # of a core


def cpu_s(pid: int) -> float:
    """CPU time of a process, ended threads included; /proc/PID/stat has it in steps of 10 ms only.

    The number is the clock that ``clock_getcpuclockid`` gives (MAKE_PROCESS_CPUCLOCK of the kernel's posix-timers.h).
    """
    return time.clock_gettime((~pid << 3) | 2)


def sampling_process(parent: psutil.Process) -> psutil.Process | None:
    """Our sampling process of this kernel."""
    return _child(parent, "air_nb.monitor.process")


def _child(parent: psutil.Process, word: str) -> psutil.Process | None:
    return next((each for each in parent.children() if word in " ".join(each.cmdline())), None)


class JupyterServer:
    """A server with one extension at most, and a kernel in it.

    Args:
        home: Directory for everything of it.
        extension: Module of the server extension.
    """

    def __init__(self, home: Path, extension: str | None) -> None:
        self.token = secrets.token_hex(16)
        self._runtime = home / "runtime"
        self._log = home / "server.log"
        self._process = self._start(home, extension)
        try:
            address = urlsplit(self._wait_for_url())
            self.host, self.port = address.hostname or "", address.port or 0
            assert eventually(self._is_listening, _START_S), self._log.read_text()
            self.kernel_id = json.loads(self.request("POST", "/api/kernels", b"{}")[1])["id"]
            self._server = psutil.Process(self._process.pid)
            self.kernel = self._wait_for_kernel()
        except BaseException:
            self.close()
            raise

    def _start(self, home: Path, extension: str | None) -> subprocess.Popen[bytes]:
        folders = {
            "JUPYTER_CONFIG_DIR": home / "config",
            "JUPYTER_DATA_DIR": home / "data",
            "JUPYTER_RUNTIME_DIR": self._runtime,
            "IPYTHONDIR": home / "ipython",
            "AIR_NB_HOME": home / "air_nb",
        }
        environment = os.environ | {name: str(path) for name, path in folders.items()}
        environment["JUPYTER_NO_CONFIG"] = "1"  # nor the extensions that are on for everybody
        home.mkdir()
        options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
        options += [f"--ServerApp.root_dir={home}", f"--IdentityProvider.token={self.token}"]
        if extension is not None:
            options.append(f"--ServerApp.jpserver_extensions={{'{extension}': True}}")
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "jupyter_server", *options],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _wait_for_url(self) -> str:
        if not eventually(lambda: self._process.poll() is not None or bool(self._read_url()), _START_S):
            raise RuntimeError(f"the Jupyter server has not started in {_START_S:g} s:\n{self._log.read_text()}")
        return self._read_url()

    def _read_url(self) -> str:
        for file in self._runtime.glob("jpserver-*.json"):
            with suppress(ValueError):  # half of it
                return str(json.loads(file.read_text())["url"])
        return ""

    def _is_listening(self) -> bool:
        """A moment after it has said where."""
        with suppress(OSError), socket.create_connection((self.host, self.port)):
            return True
        return False

    def _wait_for_kernel(self) -> psutil.Process:
        assert eventually(lambda: _child(self._server, "ipykernel_launcher") is not None, _START_S)
        kernel = _child(self._server, "ipykernel_launcher")
        assert kernel is not None, "it was there"
        return kernel

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Ask the server.

        Returns:
            Bytes of the whole answer, and its body.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_ANSWER_S)
        try:
            connection.request(method, path, body, {"Authorization": f"token {self.token}"})
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        assert response.status < http.client.MULTIPLE_CHOICES, f"{method} {path}: {response.status} {content[:500]!r}"
        head = f"HTTP/1.1 {response.status} {response.reason}"
        fields = sum(len(name) + len(value) + 4 for name, value in response.getheaders())
        return len(head) + 2 + fields + 2 + len(content), content

    def open(self, path: str, protocol: str | None = None) -> websocket.WebSocket:
        """A WebSocket to it."""
        mark = "&" if "?" in path else "?"
        url = f"ws://{self.host}:{self.port}{path}{mark}token={self.token}"
        return websocket.create_connection(url, timeout=_ANSWER_S, subprotocols=[protocol] if protocol else None)

    def open_channels(self, session: str, protocol: str | None = None) -> websocket.WebSocket:
        """A WebSocket to the kernel."""
        return self.open(f"/api/kernels/{self.kernel_id}/channels?session_id={session}", protocol)

    def cpu_s(self) -> dict[str, float]:
        """CPU time of the server, the kernel, and our sampling process so far."""
        processes = {"server": self._server, "kernel": self.kernel, "sampling process": sampling_process(self.kernel)}
        return {name: cpu_s(process.pid) if process else 0.0 for name, process in processes.items()}

    def settle(self, timeout_s: float = 60.0) -> None:
        """Wait until it and all below it do nothing, such as warming up."""
        end = time.monotonic() + timeout_s
        quiet, before = 0, self._all_cpu_s()
        while quiet < 3 and time.monotonic() < end:  # noqa: PLR2004 - one quiet moment may be a wait for the disk
            time.sleep(1)
            now = self._all_cpu_s()
            quiet = quiet + 1 if now - before < _QUIET_SHARE else 0
            before = now

    def _all_cpu_s(self) -> float:
        total = 0.0
        for process in (self._server, *self._server.children(recursive=True)):
            with suppress(OSError):  # ended
                total += cpu_s(process.pid)
        return total

    def close(self) -> None:
        """End it and all below it."""
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(self._process.pid).children(recursive=True)
            self._process.send_signal(signal.SIGTERM)
            _, left = psutil.wait_procs([psutil.Process(self._process.pid), *below], timeout=15)
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait(timeout=10)


class Listener:
    """Takes in all that comes on a WebSocket, on a thread of its own, and counts its bytes."""

    def __init__(self, connection: websocket.WebSocket, on_text: Callable[[str], None] = lambda _text: None) -> None:
        self.n_bytes = 0
        self._socket = connection
        self._on_text = on_text
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._listen, name="benchmarks-listener", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with suppress(websocket.WebSocketException, OSError):  # closed
            while True:
                code, data = self._socket.recv_data()
                self.n_bytes += len(data)
                if code == websocket.ABNF.OPCODE_TEXT:
                    self._on_text(data.decode())

    def send(self, value: dict[str, Any]) -> None:
        """Send a JSON object."""
        self._socket.send(json.dumps(value))

    def close(self) -> None:
        """Hang up."""
        with suppress(websocket.WebSocketException, OSError):  # the server may have been first
            self._socket.close()
        self._thread.join(timeout=10)
