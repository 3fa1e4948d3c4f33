"""The wheel's labextension in other front ends than the one in this environment; only with AIR_NB_TEST_VERSIONS=1.

Each gets a fresh virtual environment, from the package index, with the front end and the built wheel and nothing that
the package depends on: the extension needs no torch. The kernel is the one of this environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.lab import BASE_URL, Lab, NotebookPage
from tests.browser.sidebar_page import SidebarPage
from tests.nvml.fixtures import nvml_library  # noqa: F401 - a fixture
from tests.nvml.stub import FakeNvml
from tests.support.wait import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.environ.get("AIR_NB_TEST_VERSIONS") != "1", reason="installs three front ends: AIR_NB_TEST_VERSIONS=1"
    ),
]

_CHECKOUT = Path(__file__).parents[2]
_ENDLESS = "%%distributed --nproc 2 --name {name}\nimport time\nwhile True: time.sleep(0.1)"
# Oldest and newest that are supported.
_FRONT_ENDS = {"old-lab": "jupyterlab==4.4.*", "new-lab": "jupyterlab", "notebook-7": "notebook>=7,<8"}


class Notebook7(Lab):
    """A server of Jupyter Notebook."""

    def page_url(self, notebook: str) -> str:
        return f"{self.url}notebooks/{notebook}?token={self._token}"


class Notebook7Page(NotebookPage):
    """It has no status bar."""

    def wait_for_status(self, status: str, timeout_s: float = 60.0) -> None:
        assert eventually(lambda: self._lab.kernel_state(self.name) == status.lower(), timeout_s)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, _CHECKOUT], check=True)
    built: list[Path] = list(folder.glob("air_nb-*.whl"))
    return built[0]


def _make_environment(folder: Path, requirement: str, wheel: Path) -> str:
    """Returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    for arguments in ([requirement], ["--no-deps", str(wheel)]):
        subprocess.run([python, "-m", "pip", "install", "-q", *arguments], check=True)
    return python


def _write_kernelspec(folder: Path) -> None:
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    folder.mkdir(parents=True)
    spec = {"argv": command, "display_name": "Python 3 (ipykernel)", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))


@pytest.fixture(params=_FRONT_ENDS)
def server(request, wheel, nvml_library, tmp_path) -> Iterator[Lab]:  # noqa: F811
    python = _make_environment(tmp_path / "venv", _FRONT_ENDS[request.param], wheel)
    _write_kernelspec(tmp_path / "share" / "kernels" / "python3")
    env = FakeNvml(nvml_library, tmp_path / "state.txt").environment | {"JUPYTER_PATH": str(tmp_path / "share")}
    kind, app = (Notebook7, "notebook") if request.param == "notebook-7" else (Lab, "jupyterlab")
    server = kind(tmp_path, env=env, python=python, app=app)
    yield server
    server.close()


def test_the_panel_of_the_wheel_opens_stops_a_run_and_closes(browser, server, screenshots, request):
    assert BASE_URL in server.url
    run = request.node.callspec.id
    page = browser.new_page(viewport={"width": 1200, "height": 1000})
    errors: list[str] = []  # Notebook 7 has some of its own
    page.on("pageerror", lambda error: errors.append(str(error.stack)) if "air-nb" in str(error.stack) else None)
    kind = Notebook7Page if isinstance(server, Notebook7) else NotebookPage
    try:
        notebook = kind(page, server, "versions.ipynb", ("%load_ext air_nb", "%air sidebar", _ENDLESS.format(name=run)))
        panel = SidebarPage(page)
        notebook.run(0)
        notebook.run(1)
        panel.wait_until_open()
        assert panel.gpus().count() == 8
        notebook.start(2)
        panel.wait_for_run(run, "Running")
        panel.press(f"Stop {run}")
        panel.press(f"Stop {run}, really")
        panel.wait_for_run(run, "Killed")
        notebook.wait(2)
        (screenshots / f"{run}.png").write_bytes(page.screenshot())
        assert "panel closed" in notebook.run(1)
        panel.wait_until_closed()
        assert not errors
    finally:
        page.close()
