"""Memory of idle ranks and of everything that a tool keeps beside them (PSS: shared pages are shared out)."""

from __future__ import annotations

import re
import time
from pathlib import Path

from benchmarks.harness import BenchKernel, arrivals
from benchmarks.report import Report, Settings
from benchmarks.tools import AirNb, Tool, Torchrun, ready_kernels

__all__ = ["run"]

_RANKS = 8
_LIMIT_S = 240.0
_UP = re.compile(r"<rank \d+ is up>")
_IDLE = 'import time, torch\nprint(f"<rank {rank} is up>", flush=True)\ntime.sleep(3600)\n'


def run(settings: Settings) -> Report:
    """Measure with the ranks of one tool at a time."""
    report = Report("memory")
    tools: list[Tool] = [AirNb(), Torchrun()]
    with ready_kernels(tools, _RANKS) as kernels:
        for tool, kernel in kernels.items():
            report.add("no ranks", "PSS of all processes but the kernel", tool.name, _pss_mb(kernel), "MB")
        for repeat in settings.rounds:
            for tool, kernel in kernels.items():
                cell = kernel.start(tool.cell(_IDLE, _RANKS, kernel.cwd))
                kernel.follow(cell, until=lambda cell: len(arrivals(cell, _UP)) == _RANKS, timeout_s=_LIMIT_S)
                time.sleep(1.0)
                used = _pss_mb(kernel)
                report.add(
                    f"{_RANKS} idle ranks", "PSS of all processes but the kernel", tool.name, used, "MB", repeat=repeat
                )
                kernel.interrupt()
                kernel.follow(cell, timeout_s=_LIMIT_S)
    return report


def _pss_mb(kernel: BenchKernel) -> float:
    total = 0
    for pid in kernel.processes():
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:  # ended meanwhile
            continue
        total += next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)
    return total * 1024 / 1e6
