"""``%air ui``: MLflow's pages from the kernel, for where no Jupyter server can open them, and for whoever asks."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from air_nb.errors import PagesError
from air_nb.tracking.links import is_database, is_server, root_of
from air_nb.tracking.ui import MlflowServer

__all__ = ["MlflowPages", "ui_text"]

_START_TIMEOUT_S = 60.0
_LOOK_S = 0.25
_SAY_S = 5.0


class MlflowPages:
    """The MLflow servers of one kernel, one per store; they end with it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[str, MlflowServer] = {}

    def url(self, tracking_uri: str, say: Callable[[str], object]) -> str:
        """Where the pages of a store are; starts a server for it if there is none yet, and waits until it answers.

        Args:
            tracking_uri: Absolute tracking URI.
            say: Told what is being waited for, now and then.

        Raises:
            PagesError: It did not start, or there can't be one for this URI.
        """
        if is_server(tracking_uri):
            return root_of(tracking_uri)
        if not is_database(tracking_uri):
            msg = f"`mlflow server` can't show {tracking_uri}: look where that service shows its runs"
            raise PagesError(msg)
        with self._lock:
            server = self._servers.get(tracking_uri)
            if server is not None and server.ending() is not None:
                server.close()
                server = None
            if server is None:
                server = self._servers[tracking_uri] = _start(tracking_uri)
        _wait(server, say)
        return server.url

    def close(self) -> None:
        """End the servers; can be called twice."""
        with self._lock:
            for server in self._servers.values():
                server.close()
            self._servers.clear()


def ui_text(pages: MlflowPages, tracking_uri: str, say: Callable[[str], object]) -> str:
    """What ``%air ui`` answers; see ``MlflowPages.url``."""
    url = pages.url(tracking_uri, say)
    lines = [f"MLflow: {url}"]
    if not is_server(tracking_uri):
        address = urlsplit(url).netloc
        lines.append(f"  until this kernel ends; from another machine through `ssh -L {address}:{address} HOST`")
        if "JUPYTERHUB_SERVICE_PREFIX" in os.environ:
            lines.append("  on a hub: install air_nb[mlflow] where Jupyter itself runs; the links of runs then open")
    return "\n".join(lines)


def _start(tracking_uri: str) -> MlflowServer:
    if importlib.util.find_spec("mlflow") is None:
        msg = "MLflow is not installed here: pip install 'air_nb[mlflow]'"
        raise PagesError(msg)
    try:
        return MlflowServer(tracking_uri)
    except OSError as error:
        msg = f"`mlflow server` can't be started: {error}"
        raise PagesError(msg) from error


def _wait(server: MlflowServer, say: Callable[[str], object]) -> None:
    started = time.monotonic()
    said = 0.0
    while not server.is_ready():
        ending = server.ending()
        if ending is not None:
            raise PagesError(ending)
        waited = time.monotonic() - started
        if waited > _START_TIMEOUT_S:
            msg = f"`mlflow server` does not answer after {_START_TIMEOUT_S:g} s; it goes on starting: ask again"
            raise PagesError(msg)
        if waited >= said:
            say(f"MLflow is starting, {waited:.0f} s" if waited >= 1 else "MLflow is starting, about 10 s")
            said = waited + _SAY_S
        time.sleep(_LOOK_S)
