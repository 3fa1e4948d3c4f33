"""A web server on loopback that lists and serves files, and misbehaves as it is told."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["FileServer", "serving"]


class FileServer:
    """What is served, and how.

    Attributes:
        files: Content by path (``"a/b.bin"``).
        failures: Statuses to answer with, by path, one for each GET, before the file is served.
        hanging: Paths whose GET is never answered.
        cut: Paths of which only half of the bytes come, once.
        gets: How often each path was asked for.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.failures: dict[str, list[int]] = {}
        self.hanging: set[str] = set()
        self.cut: set[str] = set()
        self.gets: Counter[str] = Counter()
        self.stopped = threading.Event()
        self.url = ""

    def directory_page(self, directory: str) -> bytes | None:
        """Links to what is directly below; None if nothing is."""
        prefix = f"{directory.rstrip('/')}/" if directory else ""
        names = {path.removeprefix(prefix) for path in self.files if path.startswith(prefix)}
        entries = sorted({name.split("/")[0] + ("/" if "/" in name else "") for name in names})
        return "".join(f'<a href="{entry}">{entry}</a>\n' for entry in entries).encode() if entries else None


class _Server(ThreadingHTTPServer):
    state: FileServer


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        path = self.path.lstrip("/")
        state = self.server.state
        if path in state.files:
            state.gets[path] += 1
        if path in state.hanging:
            state.stopped.wait()
        elif state.failures.get(path):
            self._send(state.failures[path].pop(0), b"", "text/plain")
        else:
            self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.lstrip("/")
        state = self.server.state
        body = state.files.get(path)
        if body is None:
            page = state.directory_page(path)
            self._send(404 if page is None else 200, page or b"", "text/html", with_body=with_body)
        elif with_body and path in state.cut:
            state.cut.discard(path)
            self._send(200, body, "application/octet-stream", sent=len(body) // 2)
            self.close_connection = True
        else:
            self._send(200, body, "application/octet-stream", with_body=with_body)

    def _send(self, status: int, body: bytes, kind: str, *, with_body: bool = True, sent: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hash(body):x}"')
        self.end_headers()
        if with_body:
            self.wfile.write(body[:sent])

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[FileServer]:
    """Run a server until the block ends."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.state = FileServer()
        server.state.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, name="http files", daemon=True)
        thread.start()
        try:
            yield server.state
        finally:
            server.state.stopped.set()
            server.shutdown()
            thread.join()
