"""A JupyterLab server as a hub starts it (token, a base URL of its own), and one notebook open in a page of it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
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
# Of the notebook in front: others that are open stay in the page, hidden.
_CELLS = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook .jp-Cell"
_PROMPT = f"index => document.querySelectorAll('{_CELLS}')[index].querySelector('.jp-InputPrompt')"
_IS_DONE = rf"index => /\[\d+\]/.test(({_PROMPT})(index).textContent)"


def measured(text: str) -> None:
    """Show a figure that is not asserted, or with room only: ``pytest -s``, or ``-rP``."""
    sys.stdout.write(f"{text}\n")


class Lab:
    """A server process and its REST interface.

    Args:
        home: Directory for everything of this server: notebooks, settings, connection files, log.
        theme: JupyterLab's name of it.
        env: More variables for the server, and so for its kernels.
        python: Of the environment that the server runs in.
        app: Module that is the server: ``jupyterlab`` or ``notebook``.
    """

    def __init__(
        self,
        home: Path,
        *,
        theme: str = "JupyterLab Light",
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        app: str = "jupyterlab",
    ) -> None:
        self.root = home / "notebooks"
        self.runtime = home / "runtime"
        self._log = home / "server.log"
        self._page_config = home / "config" / "labconfig" / "page_config.json"
        self._token = secrets.token_hex(16)
        self.root.mkdir()
        self._write_settings(home / "settings", theme)
        self.process = self._start(home, [python, "-m", app], env or {})
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

    def _start(self, home: Path, program: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        folders = {
            "HOME": home,
            "JUPYTER_CONFIG_DIR": home / "config",
            "JUPYTER_DATA_DIR": home / "data",
            "JUPYTER_RUNTIME_DIR": self.runtime,
            "JUPYTERLAB_SETTINGS_DIR": home / "settings",
            "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        }
        command = [*program, "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
        options = {
            "ServerApp.base_url": BASE_URL,
            "ServerApp.root_dir": self.root,
            "IdentityProvider.token": self._token,
            "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        }
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [*command, *(f"--{name}={value}" for name, value in options.items())],
                env={
                    **os.environ,
                    **{name: str(path) for name, path in folders.items()},
                    "AIR_NB_DEVICE": "cpu",
                    **env,
                },
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

    @contextmanager
    def without_extensions(self, *names: str) -> Iterator[None]:
        """Pages that are loaded meanwhile lack these: as after ``jupyter labextension disable``."""
        self._page_config.parent.mkdir(parents=True, exist_ok=True)
        self._page_config.write_text(json.dumps({"disabledExtensions": dict.fromkeys(names, True)}))
        try:
            yield
        finally:
            self._page_config.unlink()

    def write_notebook(self, name: str, sources: Sequence[str]) -> Path:
        """A notebook of these cells."""
        spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        cells = [new_code_cell(source) for source in sources]
        nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": spec}), self.root / name)
        return self.root / name

    def kernel_of(self, notebook: str) -> str | None:
        """Id of a notebook's kernel."""
        return next((s["kernel"]["id"] for s in self.api("sessions") if s["path"] == notebook), None)

    def kernel_state(self, notebook: str) -> str | None:
        """What the server holds a notebook's kernel for: busy kernels are not culled."""
        return next((s["kernel"]["execution_state"] for s in self.api("sessions") if s["path"] == notebook), None)

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
def running_lab(home: Path, **options: Any) -> Iterator[Lab]:
    """A server, ended whatever happens; the options are those of `Lab`."""
    lab = Lab(home, **options)
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
        self.file = lab.write_notebook(name, sources)
        self._lab = lab
        page.add_init_script(_RECORD_LONG_TASKS)
        page.goto(lab.page_url(name))
        self._wait_for_cells()
        self.wait_for_idle()

    def _wait_for_cells(self) -> None:
        self.page.wait_for_selector(f"{_CELLS} .cm-content", timeout=60_000)

    def reload(self) -> None:
        """Load the page again, with what it had open."""
        self.page.goto(self.page.url.replace("&reset", "").replace("?reset", ""))
        self._wait_for_cells()

    def open_another(self, name: str, sources: Sequence[str]) -> None:
        """Make a second notebook and open it in front of this one, in the same page."""
        self._lab.write_notebook(name, sources)
        self.page.locator('[data-command="filebrowser:refresh"]').click()
        self.page.locator(".jp-DirListing-item", has_text=name).dblclick()
        self.bring_to_front(name)
        self._wait_for_cells()
        self.wait_for_idle()

    def bring_to_front(self, name: str) -> None:
        """Click on a notebook's tab."""
        self.page.locator("#jp-main-dock-panel .lm-TabBar-tab", has_text=name).click()

    def wait_for_status(self, status: str, timeout_s: float = 60.0) -> None:
        """Until the kernel is shown as ``Idle`` or ``Busy`` in the status bar."""
        self.page.locator("#jp-main-statusbar", has_text=f"ipykernel) | {status}").wait_for(timeout=timeout_s * 1000)

    def wait_for_idle(self, timeout_s: float = 60.0) -> None:
        """Until the kernel is idle by the status bar (the toolbar's circle also is when there is none yet)."""
        self.wait_for_status("Idle", timeout_s)

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

    def choose_theme(self, theme: str) -> None:
        """From the menu."""
        self.page.locator(".lm-MenuBar-item", has_text="Settings").click()
        for label in ("Theme", theme):
            self.page.locator(".lm-Menu-itemLabel").get_by_text(label, exact=True).click()

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
        return self.page.locator(_CELLS).nth(index)

    def _toolbar(self, command: str) -> Any:
        toolbar = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-NotebookPanel-toolbar"
        return self.page.locator(f'{toolbar} [data-command="notebook:{command}"]')
