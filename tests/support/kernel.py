"""A real ipykernel, driven as a front end would, every IOPub message kept with its time."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

__all__ = ["Cell", "Kernel", "plain", "running_kernel"]

_FIRST_TRY_S = 30
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(text: str) -> str:
    """Text without colours."""
    return _ANSI.sub("", text)


@dataclass
class Cell:
    """One executed cell.

    Attributes:
        msg_id: Of the execute request.
        messages: IOPub messages whose parent it is, with the time of their arrival.
        reply_status: ``"ok"`` or ``"error"``.
    """

    msg_id: str
    messages: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    reply_status: str = ""
    sent_at: float = 0.0
    idle_at: float = 0.0

    def stream(self, name: str | None = None) -> str:
        """Stream text, of one stream or of both."""
        return "".join(
            message["content"]["text"]
            for _, message in self.messages
            if message["msg_type"] == "stream" and name in (None, message["content"]["name"])
        )

    def displays(self) -> list[dict[str, Any]]:
        """Contents of display_data, execute_result and update_display_data messages."""
        kinds = ("display_data", "execute_result", "update_display_data")
        return [message["content"] for _, message in self.messages if message["msg_type"] in kinds]

    @property
    def error(self) -> dict[str, Any] | None:
        """Content of the error message."""
        return next((message["content"] for _, message in self.messages if message["msg_type"] == "error"), None)

    @property
    def traceback(self) -> str:
        """The error as shown, without colours; empty if there was none."""
        return plain("\n".join(self.error["traceback"])) if self.error else ""

    @property
    def text(self) -> str:
        """All that a reader sees, without colours: streams, the last state of displays, the error."""
        shown: dict[str, str] = {}
        parts: list[str] = []
        for index, (_, message) in enumerate(self.messages):
            content = message["content"]
            if message["msg_type"] == "stream":
                parts.append(content["text"])
            elif message["msg_type"] in ("display_data", "execute_result", "update_display_data"):
                key = content.get("transient", {}).get("display_id") or f"#{index}"
                if key not in shown:
                    parts.append(f"\0{key}\0")
                shown[key] = content["data"].get("text/plain", "") + "\n"
        text = "".join(parts)
        for key, value in shown.items():
            text = text.replace(f"\0{key}\0", value)
        return plain(text) + self.traceback


class Kernel:
    """A kernel in its own working directory."""

    def __init__(self, cwd: Path, env: dict[str, str] | None = None) -> None:
        self.cwd = cwd
        for is_last in (False, True):
            self.manager = KernelManager(kernel_name="python3")
            self.manager.start_kernel(
                cwd=str(cwd), env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            self.client = self.manager.client()
            self.client.start_channels()
            try:
                self.client.wait_for_ready(timeout=60 if is_last else _FIRST_TRY_S)
                break
            except RuntimeError:
                # jupyter_client chooses free ports and lets go of them again: another process may have taken one.
                self.client.stop_channels()
                self.manager.shutdown_kernel(now=True)
                if is_last:
                    raise
        self.pid: int = self.manager.provisioner.pid  # type: ignore[union-attr]

    def start(self, code: str) -> Cell:
        """Send a cell and return at once."""
        sent_at = time.monotonic()
        return Cell(self.client.execute(code, store_history=True, allow_stdin=False), sent_at=sent_at)

    def follow(self, cell: Cell, until: Callable[[Cell], bool] | None = None, timeout_s: float = 60.0) -> Cell:
        """Take in messages until the cell is idle or ``until`` holds.

        Raises:
            TimeoutError: Neither came; the message has what was shown.
        """
        end = time.monotonic() + timeout_s
        while not cell.idle_at:
            if until is not None and until(cell):
                return cell
            if time.monotonic() > end:
                raise TimeoutError(f"the cell did not get there in {timeout_s:g} s; shown so far:\n{cell.text}")
            try:
                message = self.client.get_iopub_msg(timeout=0.1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != cell.msg_id:
                continue
            cell.messages.append((time.monotonic(), message))
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                cell.idle_at = time.monotonic()
                cell.reply_status = self._reply(cell)
        return cell

    def _reply(self, cell: Cell) -> str:
        while True:
            reply = self.client.get_shell_msg(timeout=10)
            if reply["parent_header"].get("msg_id") == cell.msg_id:
                return str(reply["content"]["status"])

    def run(self, code: str, timeout_s: float = 60.0) -> Cell:
        """Run a cell to its end."""
        return self.follow(self.start(code), timeout_s=timeout_s)

    def ok(self, code: str, timeout_s: float = 60.0) -> Cell:
        """Run a cell that must not fail."""
        cell = self.run(code, timeout_s)
        assert cell.reply_status == "ok", cell.text
        return cell

    def value(self, expression: str) -> str:
        """``repr`` of an expression in the kernel."""
        cell = self.ok(f"print(repr({expression}))")
        return cell.stream("stdout").removesuffix("\n")

    def interrupt(self) -> None:
        """As Jupyter's stop button."""
        self.manager.interrupt_kernel()

    def restart(self) -> None:
        """As Jupyter's restart button."""
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=60)
        self.pid = self.manager.provisioner.pid  # type: ignore[union-attr]

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def descendants(self) -> list[psutil.Process]:
        """Everything below the kernel, the launcher's own session too."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """Shut down as Jupyter does."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@contextmanager
def running_kernel(cwd: Path, *, load: bool = True, env: dict[str, str] | None = None) -> Iterator[Kernel]:
    """A kernel, with the extension loaded unless told otherwise."""
    kernel = Kernel(cwd, env)
    try:
        if load:
            kernel.ok("%load_ext air_nb")
        yield kernel
    finally:
        kernel.close()
