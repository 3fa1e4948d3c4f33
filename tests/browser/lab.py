"""A JupyterLab server as a hub starts it (token, a base URL of its own), and one notebook open in a page of it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from tests.support.wait import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["CHROMIUM_ARGS", "Lab", "NotebookPage", "measured", "running_lab"]

BASE_URL = "/user/alice/"
CHROMIUM_ARGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
_POLL_MS = 200  # asking the page at every frame, as Playwright does, would itself be load
_START_S = 60.0
_STOP_S = 10.0

# What kept the page's main thread busy for over 50 ms, and whose script that was.
_RECORD_LONG_TASKS = """
window.airLongTasks = [];
window.airSlowScripts = [];
new PerformanceObserver(list => window.airLongTasks.push(...list.getEntries().map(entry => entry.duration)))
  .observe({type: 'longtask'});
new PerformanceObserver(list => window.airSlowScripts.push(...list.getEntries().flatMap(entry => entry.scripts)
  .map(script => `${Math.round(script.duration)} ms ${script.invoker}`))).observe({type: 'long-animation-frame'});
"""
_PROMPT = "index => document.querySelectorAll('.jp-Notebook .jp-Cell')[index].querySelector('.jp-InputPrompt')"
_IS_DONE = rf"index => /\[\d+\]/.test(({_PROMPT})(index).textContent)"


def measured(text: str) -> None:
    """Show a figure that is not asserted, or with room only: ``pytest -s``, or ``-rP``."""
    sys.stdout.write(f"{text}\n")


class Lab:
    """A server process and its REST interface.

    Args:
        home: Directory for everything of this server: notebooks, settings, connection files, log.
        theme: JupyterLab's name of it.
    """

    def __init__(self, home: Path, *, theme: str = "JupyterLab Light") -> None:
        self.root = home / "notebooks"
        self.runtime = home / "runtime"
        self._log = home / "server.log"
        self._token = secrets.token_hex(16)
        self.root.mkdir()
        self._write_settings(home / "settings", theme)
        self.process = self._start(home)
        self.url = self._wait_for_url()

    @staticmethod
    def _write_settings(directory: Path, theme: str) -> None:
        settings = {
            "notification": {"fetchNews": "false"},  # its toast would ask the network, and cover buttons
            "themes": {"theme": theme},
        }
        for name, values in settings.items():
            path = directory / "@jupyterlab" / "apputils-extension" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))

    def _start(self, home: Path) -> subprocess.Popen[bytes]:
        folders = {
            "HOME": home,
            "JUPYTER_CONFIG_DIR": home / "config",
            "JUPYTER_DATA_DIR": home / "data",
            "JUPYTER_RUNTIME_DIR": self.runtime,
            "JUPYTERLAB_SETTINGS_DIR": home / "settings",
            "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        }
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
        options = {
            "ServerApp.base_url": BASE_URL,
            "ServerApp.root_dir": self.root,
            "IdentityProvider.token": self._token,
            "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        }
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [*command, *(f"--{name}={value}" for name, value in options.items())],
                env={**os.environ, **{name: str(path) for name, path in folders.items()}, "AIR_NB_DEVICE": "cpu"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _wait_for_url(self) -> str:
        if not eventually(lambda: self.process.poll() is not None or bool(self._read_url()), _START_S):
            self.close()
        if self.process.poll() is not None:
            raise RuntimeError(f"JupyterLab did not start in {_START_S:g} s, or ended:\n{self._log.read_text()}")
        return self._read_url()

    def _read_url(self) -> str:
        """From the file that the server leaves for its clients; empty if it is not there yet, or half of it."""
        for file in self.runtime.glob("jpserver-*.json"):
            with suppress(ValueError):
                return str(json.loads(file.read_text())["url"])
        return ""

    def api(self, path: str, method: str = "GET") -> Any:
        """What the server answers; None if that is nothing."""
        request = urllib.request.Request(
            f"{self.url}api/{path}", method=method, headers={"Authorization": f"token {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read() or b"null")

    def page_url(self, notebook: str) -> str:
        """Address of a notebook in a workspace of its own, with nothing restored from the page before."""
        return f"{self.url}lab/workspaces/{Path(notebook).stem}/tree/{notebook}?token={self._token}&reset"

    def kernel_of(self, notebook: str) -> str | None:
        """Id of a notebook's kernel."""
        return next((s["kernel"]["id"] for s in self.api("sessions") if s["path"] == notebook), None)

    def connection_file(self, notebook: str) -> Path:
        """With which another client reaches the notebook's kernel."""
        return self.runtime / f"kernel-{self.kernel_of(notebook)}.json"

    def shut_down_kernels(self) -> None:
        """End all kernels, as a user does who is done."""
        for session in self.api("sessions"):
            self.api(f"sessions/{session['id']}", "DELETE")

    def close(self) -> None:
        """End the server and its kernels."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_STOP_S)


@contextmanager
def running_lab(home: Path, *, theme: str = "JupyterLab Light") -> Iterator[Lab]:
    """A server, ended whatever happens."""
    lab = Lab(home, theme=theme)
    try:
        yield lab
    finally:
        lab.close()


class NotebookPage:
    """A notebook as its user has it: cells are run from the keyboard, the kernel is stopped by the toolbar's buttons.

    Args:
        page: An empty page.
        lab: The server.
        name: File name of the notebook to make.
        sources: Its cells.
    """

    def __init__(self, page: Page, lab: Lab, name: str, sources: Sequence[str]) -> None:
        self.page = page
        self.name = name
        self.file = lab.root / name
        self._lab = lab
        spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = new_notebook(cells=[new_code_cell(source) for source in sources], metadata={"kernelspec": spec})
        nbformat.write(notebook, self.file)
        page.add_init_script(_RECORD_LONG_TASKS)
        page.goto(lab.page_url(name))
        page.wait_for_selector(".jp-Notebook .jp-CodeCell .cm-content", timeout=60_000)
        self.wait_for_idle()

    def wait_for_idle(self, timeout_s: float = 60.0) -> None:
        """Until the kernel is shown as idle in the status bar (the toolbar's circle also is when there is none yet)."""
        self.page.locator("#jp-main-statusbar", has_text="ipykernel) | Idle").wait_for(timeout=timeout_s * 1000)

    def start(self, index: int) -> None:
        """Run a cell and return at once."""
        # Emptied, because a restarted kernel may give the cell the number that it had.
        self.page.evaluate(f"index => {{ ({_PROMPT})(index).textContent = '' }}", index)
        self._cell(index).locator(".jp-InputArea-editor").click()
        self.page.keyboard.press("Control+Enter")

    def is_done(self, index: int) -> bool:
        """Whether a cell that was started has its number."""
        return bool(self.page.evaluate(_IS_DONE, index))

    def wait(self, index: int, timeout_s: float = 60.0) -> None:
        """Until a cell that was started is done."""
        self.page.wait_for_function(_IS_DONE, arg=index, timeout=timeout_s * 1000, polling=_POLL_MS)
        self.wait_for_idle()

    def run(self, index: int, timeout_s: float = 60.0) -> str:
        """Run a cell to its end and return what is seen below it."""
        self.start(index)
        self.wait(index, timeout_s)
        return self.output(index)

    def wait_for_text(self, index: int, text: str, timeout_s: float = 60.0) -> None:
        """Until it is seen below a cell."""
        self._cell(index).locator(".jp-OutputArea-output", has_text=text).first.wait_for(timeout=timeout_s * 1000)

    def output(self, index: int) -> str:
        """All that is seen below a cell."""
        return "\n".join(self._cell(index).locator(".jp-OutputArea-output").all_inner_texts())

    def forget_long_tasks(self) -> None:
        """Begin to measure."""
        self.page.evaluate("() => { window.airLongTasks.length = window.airSlowScripts.length = 0 }")

    def long_tasks_ms(self) -> list[float]:
        """Tasks of the page's main thread of over 50 ms since then."""
        self.page.wait_for_timeout(500)  # entries come when the thread is idle
        return [round(each) for each in self.page.evaluate("() => window.airLongTasks")]

    def slow_scripts(self) -> list[str]:
        """Scripts in frames that took over 50 ms: how long, and what called them."""
        return [str(each) for each in self.page.evaluate("() => window.airSlowScripts")]

    def press_stop(self) -> None:
        """The toolbar's button."""
        self._toolbar("interrupt-kernel").click()

    def press_restart(self) -> None:
        """The toolbar's button, and yes in the dialog that it opens."""
        self._toolbar("restart-kernel").click()
        self.page.locator(".jp-Dialog .jp-mod-accept").click()

    def save_file(self) -> bytes:
        """Save from the keyboard; what the file then has."""
        before = self.file.stat().st_mtime_ns
        self.page.keyboard.press("Control+s")
        assert eventually(lambda: self.file.stat().st_mtime_ns != before, 10), "the notebook was not saved"
        return self.file.read_bytes()

    def _cell(self, index: int) -> Any:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def _toolbar(self, command: str) -> Any:
        return self.page.locator(f'.jp-NotebookPanel-toolbar [data-command="notebook:{command}"]')
