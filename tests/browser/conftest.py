"""One JupyterLab server and one Chromium for the tests of a module; a page and a notebook for each test."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.lab import CHROMIUM_ARGS, Lab, NotebookPage, running_lab

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    """Debian's Chromium, without a window; its profile is a temporary one."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if not _CHROMIUM.exists():
        pytest.skip(f"{_CHROMIUM} is not there: apt-get install chromium")
    home = str(tmp_path_factory.mktemp("browser"))
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=_CHROMIUM, headless=True, args=CHROMIUM_ARGS, env={**os.environ, "HOME": home}
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def lab_options() -> dict[str, Any]:
    """Options of `Lab`, for a module to override."""
    return {}


@pytest.fixture(scope="module")
def lab(browser, lab_options, tmp_path_factory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab"), **lab_options) as lab:
        yield lab


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory) -> Path:
    """How each test's page looked at its end: in pytest's folder for the last three runs."""
    folder: Path = tmp_path_factory.mktemp("screenshots")
    return folder


@pytest.fixture
def open_notebook(browser: Browser, lab: Lab, screenshots: Path, request) -> Iterator[Callable[..., NotebookPage]]:
    """Make a notebook of these cells and open it; its kernel is shut down at the end."""
    name = re.sub(r"\W+", "_", request.node.name)
    with ExitStack() as stack:
        context = browser.new_context(viewport={"width": 1200, "height": 1400})
        stack.callback(lab.shut_down_kernels)
        stack.callback(context.close)
        page = context.new_page()
        # Not by Playwright: it would write in a thread that stays.
        stack.callback(lambda: (screenshots / f"{name}.png").write_bytes(page.screenshot()))
        yield lambda *sources: NotebookPage(page, lab, f"{name}.ipynb", sources)
