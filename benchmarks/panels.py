"""Panels of GPUs or resources, each in a Jupyter server with an idle kernel, as their pages in a browser use them."""

from __future__ import annotations

import importlib.util
import json
import queue
import threading
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.measure import OURS
from benchmarks.server import JupyterServer, Listener

__all__ = ["PEERS", "AirNb", "NoPanel", "Panel", "Seen"]

_ANSWER_S = 60.0
_BEAT_S = 30.0  # of a page that is looked at
_NOTEBOOK_PROTOCOL = "v1.kernel.websocket.jupyter.org"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a page has had so far.

    Attributes:
        polls: Times that it got values, of the GPUs if the tool knows any.
        panel_bytes: All that came for the panel.
        notebook_bytes: All that came on the WebSocket that JupyterLab itself has to the kernel, and which gets every
            message of it.
    """

    polls: int
    panel_bytes: int
    notebook_bytes: int


class Panel(ABC):
    """A panel in a page that has the notebook open, too."""

    name: ClassVar[str]
    module: ClassVar[str] = "jupyter_server"
    extension: ClassVar[str | None] = None
    period_s: ClassVar[float]
    """Time between polls unless its user has set another."""

    def __init__(self, home: Path) -> None:
        self.polls = 0
        self.server = JupyterServer(home, self.extension)
        self._notebook = Listener(self.server.open_channels(uuid.uuid4().hex, _NOTEBOOK_PROTOCOL))

    @classmethod
    def is_installed(cls) -> bool:
        """Whether it can be measured here."""
        return importlib.util.find_spec(cls.module) is not None

    @abstractmethod
    def watch(self, period_s: float) -> None:
        """The panel is in sight, and polls that often."""

    @abstractmethod
    def hide(self) -> None:
        """The panel is out of sight."""

    @property
    def panel_bytes(self) -> int:
        """See `Seen`."""
        return 0

    def seen(self) -> Seen:
        """What has come so far."""
        return Seen(self.polls, self.panel_bytes, self._notebook.n_bytes)

    def close(self) -> None:
        """End all of it."""
        self._notebook.close()
        self.server.close()


class NoPanel(Panel):
    """A server, a kernel and a notebook: what is there without any panel."""

    name = "no panel"
    period_s = 0.0

    def watch(self, period_s: float) -> None:
        """There is none."""

    def hide(self) -> None:
        """There is none."""


class AirNb(Panel):
    """Our panel in the sidebar: it talks to the kernel as ``labextension/remoteEntry.js`` does."""

    name = OURS
    period_s = 10.0

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._session, self._comm, self._subshell = uuid.uuid4().hex, uuid.uuid4().hex, ""
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._panel = Listener(self.server.open_channels(self._session), self._on_text)
        loaded = self._ask("shell", "execute_request", code="%load_ext air_nb", silent=False, store_history=False)
        assert loaded["status"] == "ok", loaded
        self._subshell = str(self._ask("control", "create_subshell_request")["subshell_id"])
        self._post("shell", "comm_open", comm_id=self._comm, target_name="air_nb.panel", data={})
        self._is_hidden = threading.Event()
        self._beats: threading.Thread | None = None

    def _post(self, channel: str, kind: str, **content: Any) -> str:
        header = {"msg_id": uuid.uuid4().hex, "msg_type": kind, "session": self._session, "username": "benchmarks"}
        header |= {"version": "5.4", "date": "2020-01-01T00:00:00Z"}
        if self._subshell and channel == "shell":
            header["subshell_id"] = self._subshell
        message = {"channel": channel, "header": header, "parent_header": {}, "metadata": {}, "content": content}
        self._panel.send(message | {"buffers": []})
        return header["msg_id"]

    def _ask(self, channel: str, kind: str, **content: Any) -> dict[str, Any]:
        number = self._post(channel, kind, **content)
        while True:
            reply = self._replies.get(timeout=_ANSWER_S)
            if reply["parent_header"].get("msg_id") == number:
                return dict(reply["content"])

    def _on_text(self, text: str) -> None:
        message = json.loads(text)
        if message["msg_type"].endswith("_reply"):
            self._replies.put(message)
        elif message["msg_type"] == "comm_msg" and message["content"]["data"].get("type") == "sample":
            self.polls += bool(message["content"]["data"]["gpus"])

    def _say(self, **data: Any) -> None:
        self._post("shell", "comm_msg", comm_id=self._comm, data=data)

    @property
    def panel_bytes(self) -> int:
        """See `Seen`."""
        return self._panel.n_bytes

    def watch(self, period_s: float) -> None:
        """The panel is in sight, and its page says so again and again."""
        self._say(type="interval", seconds=period_s)
        if self._beats is None:
            self._is_hidden.clear()
            self._beats = threading.Thread(target=self._beat, name="benchmarks-beats", daemon=True)
            self._beats.start()

    def _beat(self) -> None:
        while True:
            self._say(type="presence", view="v", state="active")
            if self._is_hidden.wait(_BEAT_S):
                return

    def hide(self) -> None:
        """The panel is out of sight."""
        if self._beats is not None:
            self._is_hidden.set()
            self._beats.join()
            self._beats = None
        self._say(type="presence", view="v", state="hidden")

    def close(self) -> None:
        """End all of it."""
        self.hide()
        self._panel.close()
        super().close()


class Nvdashboard(Panel):
    """The tab "GPU Resources" of jupyterlab-nvdashboard: utilisation and memory of each GPU, on one WebSocket."""

    name = "jupyterlab-nvdashboard"
    module = extension = "jupyterlab_nvdashboard"
    period_s = 0.1

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._tab = Listener(self.server.open("/nvdashboard/gpu_resource"), self._on_text)

    def _on_text(self, text: str) -> None:
        self.polls += bool(json.loads(text).get("gpu_utilization_individual"))

    @property
    def panel_bytes(self) -> int:
        """See `Seen`."""
        return self._tab.n_bytes

    def watch(self, period_s: float) -> None:
        """The tab is open."""
        self._tab.send({"updateFrequency": period_s * 1000, "isPaused": False})

    def hide(self) -> None:
        """Its user has paused it."""
        self._tab.send({"updateFrequency": self.period_s * 1000, "isPaused": True})

    def close(self) -> None:
        """End all of it."""
        self._tab.close()
        super().close()


class ResourceUsage(Panel):
    """The memory in the status bar by jupyter-resource-usage; it knows no GPUs."""

    name = "jupyter-resource-usage"
    module = extension = "jupyter_resource_usage"
    period_s = 5.0

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._n_bytes = 0
        self._is_hidden = threading.Event()
        self._asking: threading.Thread | None = None

    @property
    def panel_bytes(self) -> int:
        """See `Seen`."""
        return self._n_bytes

    def watch(self, period_s: float) -> None:
        """The page is in sight."""
        self.hide()
        self._is_hidden.clear()
        self._asking = threading.Thread(target=self._ask, args=(period_s,), name="benchmarks-asking", daemon=True)
        self._asking.start()

    def _ask(self, period_s: float) -> None:
        while not self._is_hidden.wait(period_s):
            n_bytes, _ = self.server.request("GET", "/api/metrics/v1")
            self._n_bytes += n_bytes
            self.polls += 1

    def hide(self) -> None:
        """The page is out of sight."""
        if self._asking is not None:
            self._is_hidden.set()
            self._asking.join()
            self._asking = None

    def close(self) -> None:
        """End all of it."""
        self.hide()
        super().close()


PEERS: tuple[type[Panel], ...] = (Nvdashboard, ResourceUsage)
