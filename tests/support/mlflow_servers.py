"""Tracking servers on loopback: a real one, and real culprits. Their stores: ``tests.support.mlflow_stores``."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.support.mlflow_stores import SERVED_ARTIFACTS, sqlite_store

__all__ = [
    "Culprit",
    "MlflowServer",
    "RecoveringServer",
    "failing_server",
    "real_server",
    "recovering_server",
    "refusing_uri",
    "silent_server",
]

_START_S = 120.0
_STOP_S = 10.0
_HOST = "127.0.0.1"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)

_ERROR = '{"error_code": "INTERNAL_ERROR", "message": "out of order"}'

_T = TypeVar("_T")
_Reader = asyncio.StreamReader
_Writer = asyncio.StreamWriter
_Answer = Callable[[_Reader, _Writer], Awaitable[None]]


# ------------------------------------------------------------------------------------------------------- a real one


@dataclass(frozen=True, slots=True)
class MlflowServer:
    """A real ``mlflow server``.

    Attributes:
        uri: Tracking URI.
        store_uri: The sqlite store behind it, for ``read_runs``.
        process: Leads a process group and a session of its own.
    """

    uri: str
    store_uri: str
    process: subprocess.Popen[bytes]


@contextmanager
def real_server(directory: Path) -> Iterator[MlflowServer]:
    """A server with its store, artifacts and log in the directory; takes about ten seconds to start."""
    store_uri = sqlite_store(directory)
    port = _free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", _HOST, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", store_uri, "--artifacts-destination", str(directory / SERVED_ARTIFACTS)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # 2 processes instead of 10
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        server = MlflowServer(f"http://{_HOST}:{port}", store_uri, process)
        _wait_until_healthy(server, log)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=_STOP_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(server: MlflowServer, log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and server.process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{server.uri}/health", timeout=5):
            return
        time.sleep(0.1)
    raise RuntimeError(f"no MLflow server at {server.uri} after {_START_S:g} s; its log:\n{log.read_text()}")


# --------------------------------------------------------------------------------------------------------- culprits


class Culprit:
    """A TCP server in a thread of this process.

    Attributes:
        uri: Tracking URI.
        requests: First lines of what was asked, such as ``"POST /api/2.0/mlflow/runs/log-batch HTTP/1.1"``; empty
            texts for who sent none. Only of servers that read.
        connections: How many were accepted.
    """

    def __init__(self, answer: _Answer) -> None:
        self.requests: list[str] = []
        self.connections = 0
        self._answer = answer
        self._socket = socket.socket()
        self._socket.bind((_HOST, 0))  # connections are refused until it listens, and nobody else gets the port
        self.uri = f"http://{_HOST}:{self._socket.getsockname()[1]}"
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tests-culprit")
        self._thread.start()

    def listen(self) -> None:
        """Accept connections from now on."""
        if self._server is None:
            self._server = self._run(asyncio.start_server(self._serve, sock=self._socket))

    def close(self) -> None:
        """Cut all connections; refuse new ones."""
        self._run(self._cut_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_STOP_S)
        self._loop.close()
        self._socket.close()

    async def _serve(self, reader: _Reader, writer: _Writer) -> None:
        self.connections += 1
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):  # the client's end, or ours
            await self._answer(reader, writer)
        writer.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=_STOP_S)

    async def _cut_all(self) -> None:
        if self._server is not None:
            self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@contextmanager
def silent_server() -> Iterator[Culprit]:
    """Accepts every connection and never answers."""
    with _running(_say_nothing) as culprit:
        culprit.listen()
        yield culprit


@contextmanager
def refusing_uri() -> Iterator[str]:
    """The URI of a port that refuses connections, and that nobody else gets meanwhile."""
    with _running(_say_nothing) as culprit:
        yield culprit.uri


@contextmanager
def failing_server(status: int = 500, body: str = _ERROR) -> Iterator[Culprit]:
    """Answers everything with this status; a body that starts with ``<`` is sent as HTML, as proxies do."""
    kind = "text/html" if body.startswith("<") else "application/json"
    head = f"HTTP/1.1 {status} Culprit\r\nContent-Type: {kind}\r\nContent-Length: {len(body.encode())}\r\n"
    answer = f"{head}Connection: close\r\n\r\n{body}".encode()

    async def fail(reader: _Reader, writer: _Writer) -> None:
        culprit.requests.append(await _read_request(reader))
        writer.write(answer)
        await writer.drain()

    with _running(fail) as culprit:
        culprit.listen()
        yield culprit


class RecoveringServer(Culprit):
    """Is silent, or refuses, until it is told to be a proxy of a real server."""

    def __init__(self) -> None:
        super().__init__(self._forward)
        self._target: int | None = None

    def recover(self, server: MlflowServer) -> None:
        """Forward connections that are made from now on; older ones stay silent."""
        self._target = int(server.uri.rpartition(":")[2])
        self.listen()

    def hang(self) -> None:
        """Be silent again, on open connections too."""
        self._target = None

    async def _forward(self, reader: _Reader, writer: _Writer) -> None:
        if self._target is None:
            await _say_nothing(reader, writer)
            return
        there_reader, there_writer = await asyncio.open_connection(_HOST, self._target)
        try:
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        finally:
            there_writer.close()

    async def _pump(self, reader: _Reader, writer: _Writer) -> None:
        while data := await reader.read(65536):
            if self._target is None:
                await _say_nothing(reader, writer)
                break
            writer.write(data)
            await writer.drain()
        writer.close()


@contextmanager
def recovering_server(*, refuses: bool = False) -> Iterator[RecoveringServer]:
    """Silent, or refusing, until ``recover(server)``."""
    culprit = RecoveringServer()
    try:
        if not refuses:
            culprit.listen()
        yield culprit
    finally:
        culprit.close()


@contextmanager
def _running(answer: _Answer) -> Iterator[Culprit]:
    culprit = Culprit(answer)
    try:
        yield culprit
    finally:
        culprit.close()


async def _say_nothing(reader: _Reader, writer: _Writer) -> None:
    del writer
    while await reader.read(65536):  # until the client gives up
        pass


async def _read_request(reader: _Reader) -> str:
    """Take in a whole request: one that is cut off while the client still writes looks like a lost connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    await reader.readexactly(int(length.group(1)) if length else 0)
    return head.partition(b"\r\n")[0].decode()
