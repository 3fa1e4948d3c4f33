"""A notebook without Jupyter, and a rank without a launcher: its payload and results cross a real process border."""

from __future__ import annotations

import builtins
import linecache
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from air_nb.capture.freeze import CapturedNamespace, capture
from air_nb.protocol.bundle import Bundle
from air_nb.protocol.pickling import thaw

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_RANK = """
import sys
from pathlib import Path
from air_nb.protocol.bundle import Bundle
from air_nb.protocol.pickling import ShippedRegistry, freeze_values, thaw

payload, result, code, *names = sys.argv[1:]
registry = ShippedRegistry()
main = {"__name__": "__main__", "__builtins__": __builtins__}
main.update(thaw(Bundle.open(Path(payload)), main_globals=main, registry=registry))
exec(compile(code, "<cell of the rank>", "exec"), main)
freeze_values({name: main[name] for name in names}, registry=registry).write(Path(result))
"""


class Notebook:
    """Runs cells in one namespace, as IPython does, and sends names of it to a rank."""

    def __init__(self, folder: Path) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        self.filenames: list[str] = []
        self._folder = folder

    def run(self, cell: str) -> None:
        filename = f"<{self._folder.name}-{len(self.filenames)}>"
        self.filenames.append(filename)
        linecache.cache[filename] = (len(cell), None, cell.splitlines(keepends=True), filename)
        exec(compile(cell, filename, "exec"), self.namespace)

    def capture(
        self, *names: str, limit_bytes: int = 1 << 28, hidden: dict[str, Any] | None = None
    ) -> CapturedNamespace:
        return capture(names, self.namespace, main_globals=self.namespace, limit_bytes=limit_bytes, hidden=hidden or {})

    def on_rank(self, captured: CapturedNamespace, cell: str, *results: str) -> dict[str, Any]:
        """Run a cell in a fresh process that has what was captured; returns the values of ``results`` there."""
        payload, result = self._folder / "payload", self._folder / "result"
        captured.bundle.write(payload)
        command = [sys.executable, "-c", _RANK, str(payload), str(result), cell, *results]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return thaw(Bundle.open(result), shipped=captured.shipped)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    made = Notebook(tmp_path)
    yield made
    for filename in made.filenames:
        linecache.cache.pop(filename, None)
