"""The panel in the right sidebar of a real JupyterLab, as its user has it: found by its labels, used by its buttons."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Locator, Page

__all__ = ["SidebarPage"]

_PATIENCE_MS = 30_000
_MIDDLE = 400.0  # of the page's height, about


class SidebarPage:
    """See the module.

    Args:
        page: The page that it is in.
        inside: Selector of what it is in: the sidebar, or the output of a cell.
    """

    def __init__(self, page: Page, inside: str = "#air-nb-panel") -> None:
        self.page = page
        self.node = page.locator(inside)
        self.samples = 0
        """Number of samples that the kernel has sent on connections that were made from now on."""
        page.on("websocket", lambda socket: socket.on("framereceived", self._count))

    def _count(self, frame: str | bytes) -> None:
        # The notebook's own connections are binary.
        if isinstance(frame, str) and '"type": "sample"' in frame:
            content: dict[str, Any] = json.loads(frame)["content"]
            self.samples += content.get("data", {}).get("type") == "sample"

    def wait_until_open(self, timeout_s: float = 30.0) -> None:
        """Until the values of the machine are seen."""
        self.node.get_by_text("Updated").wait_for(timeout=timeout_s * 1000)

    def wait_until_closed(self) -> None:
        self.node.wait_for(state="hidden", timeout=_PATIENCE_MS)

    def wait_for_text(self, text: str) -> None:
        """Until it is seen somewhere in the panel."""
        self.node.get_by_text(text).first.wait_for(timeout=_PATIENCE_MS)

    def press(self, name: str) -> None:
        """A button, by its label for screen readers."""
        self.node.get_by_role("button", name=name, exact=True).click()

    def refresh(self) -> None:
        self.press("Refresh values")

    def gpu(self, index: int) -> Locator:
        """A GPU's card or line."""
        return self.node.locator(f'[aria-label="GPUs"] > li[aria-label^="GPU {index}:"]')

    def gpus(self) -> Locator:
        """All of them that are seen."""
        return self.node.locator('[aria-label="GPUs"]:visible > li')

    def run(self, name: str, state: str = "") -> Locator:
        """A run's row; with a state: once it has that."""
        return self.node.locator(f'[aria-label="Runs"] > li[aria-label^="{name}: {state}"]')

    def wait_for_run(self, name: str, state: str) -> Locator:
        self.run(name, state).wait_for(timeout=2 * _PATIENCE_MS)
        return self.run(name)

    def set_width(self, pixels: float) -> None:
        """Drag the edge of the sidebar."""
        left, right = self.left(), self.left() + self.width()
        self.page.mouse.move(left - 2, _MIDDLE)
        self.page.mouse.down()
        self.page.mouse.move(right - pixels - 2, _MIDDLE, steps=4)
        self.page.mouse.up()

    def left(self) -> float:
        """Where it begins."""
        return float(self.node.evaluate("node => node.getBoundingClientRect().left"))

    def width(self) -> float:
        return float(self.node.evaluate("node => node.getBoundingClientRect().width"))

    def checkpoint(self, step: int, folder: Path) -> Locator:
        """The row of the one of this step below a folder; runs of other tests have saved others."""
        return self.node.locator(f'[aria-label^="Checkpoints in {folder}/"] > li[aria-label^="step {step}:"]')

    def picture(self, chart: Locator) -> str:
        """The pixels of a chart."""
        return str(chart.evaluate("canvas => canvas.toDataURL()"))
