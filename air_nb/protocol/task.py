"""What a rank is to do: ``task.json`` of the run directory, beside ``payload.pkl`` with the captured names."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["PAYLOAD_FILE", "TASK_FILE", "RankTask"]

TASK_FILE = "task.json"
PAYLOAD_FILE = "payload.pkl"


@dataclass(frozen=True, slots=True)
class RankTask:
    """Everything a rank needs besides its environment and the captured objects.

    Attributes:
        kind: ``"cell"`` runs ``source``; ``"function"`` calls the captured function.
        run_name: Readable name of the run.
        source: Text of the cell, as the user wrote it.
        header: Lines above ``source`` in the notebook cell (``%%distributed``): line numbers are those the user sees.
        execution_count: Number of the notebook cell, for ``Cell In[12]``.
        cwd: Working directory of the kernel.
        sys_path: Module search path of the kernel.
        argv: ``sys.argv`` of the kernel.
        sources: Text by file name of code that is on no disk (cells).
        cell_numbers: Number of the notebook cell by such a file name.
        out: Name of the last expression's value, or None.
        pull: Names to send back.
        positional: For a function: captured names of its positional arguments, in order.
        keywords: For a function: parameter -> captured name.
        threads: CPU threads for the rank.
        root_log_level: Level of the kernel's root logger.
        log_format: Format of its first handler; None if it has no handler.
        matplotlib_backend: Back end chosen in the kernel, if matplotlib is imported there.
        colors: IPython colour theme of the kernel.
        import_hook: ``"package.module:function"``, called with the run directory and the rank before the user's code.
    """

    kind: Literal["cell", "function"]
    run_name: str
    source: str
    header: str
    execution_count: int
    cwd: str
    sys_path: list[str]
    argv: list[str]
    sources: dict[str, str] = field(default_factory=dict)
    cell_numbers: dict[str, int] = field(default_factory=dict)
    out: str | None = None
    pull: list[str] = field(default_factory=list)
    positional: list[str] = field(default_factory=list)
    keywords: dict[str, str] = field(default_factory=dict)
    threads: int = 1
    root_log_level: int = 30
    log_format: str | None = None
    matplotlib_backend: str | None = None
    colors: str = "neutral"
    import_hook: str | None = None

    def write(self, directory: Path) -> None:
        """Write ``task.json``; the run directory is private, so is the file."""
        path = directory / TASK_FILE
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> RankTask:
        """Read ``task.json``."""
        return cls(**json.loads((directory / TASK_FILE).read_text()))
