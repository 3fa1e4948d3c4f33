"""From sending a cell to what its ranks do first: a line shown, an optimizer step done. Warm, cold, and by ranks."""

from __future__ import annotations

import re
import subprocess
import sys
import time

from benchmarks.harness import BenchKernel, Cell, arrivals, bench_kernel
from benchmarks.report import Report, Settings
from benchmarks.tools import AirNb, Tool, Torchrun, installed_peers, ready_kernels

__all__ = ["run"]

_RANKS = 8
_SCALING = (1, 2, 4, 8, 16, 32)
_LIMIT_S = 240.0
_LINE = re.compile(r"<line of rank \d+>")
_STEP = re.compile(r"<step of rank \d+>")
_FIRST_LINE = 'import torch\nprint(f"<line of rank {rank}>", flush=True)\n'


def _training(group: str) -> str:
    return f"""{group}import torch
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(32, 64)).sum().backward()
optimizer.step()
print(f"<step of rank {{rank}}>", flush=True)
dist.barrier()
"""


def run(settings: Settings) -> Report:
    """Measure all cases."""
    report = Report("launch", baselines=("torchrun", "import torch"))
    tools: list[Tool] = [AirNb(), Torchrun(), *installed_peers()]
    _warm(report, settings, tools)
    _cold(report, settings)
    if settings.scaling:
        _scaling(report, settings)
    return report


def _warm(report: Report, settings: Settings, tools: list[Tool]) -> None:
    with ready_kernels(tools, _RANKS) as kernels:
        for repeat in settings.rounds:
            for tool, kernel in kernels.items():
                _first_lines(report, f"{_RANKS} ranks, warm", tool, kernel, _RANKS, repeat)
            for tool, kernel in kernels.items():
                cell = kernel.run(tool.cell(_training(tool.group), _RANKS, kernel.cwd), _LIMIT_S)
                last = _last(cell, _STEP, _RANKS)
                report.add(
                    f"{_RANKS} ranks, warm", "first optimizer step of all ranks", tool.name, last, "s", repeat=repeat
                )


def _first_lines(report: Report, case: str, tool: Tool, kernel: BenchKernel, ranks: int, repeat: int) -> None:
    cell = kernel.run(tool.cell(_FIRST_LINE, ranks, kernel.cwd), _LIMIT_S)
    first = min(arrivals(cell, _LINE).values(), default=None)
    times = {
        "first line": first and first - cell.sent_at,
        "first line of all ranks": _last(cell, _LINE, ranks),
        "cell done": cell.idle_at - cell.sent_at,
    }
    for what, value in times.items():
        report.add(case, what, tool.name, value, "s", repeat=repeat, limit=_LIMIT_S)


def _last(cell: Cell, pattern: re.Pattern[str], ranks: int) -> float | None:
    """Seconds until every rank's match was shown, None if one is missing."""
    times = arrivals(cell, pattern)
    return max(times.values()) - cell.sent_at if len(times) == ranks else None


def _cold(report: Report, settings: Settings) -> None:
    """``%load_ext`` and the first cell sent at once, as Run All does."""
    case = f"{_RANKS} ranks, cold: load_ext and the cell at once"
    tool = AirNb()
    for repeat in settings.rounds:
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imported = time.monotonic() - started
        report.add(case, "first line of all ranks", "import torch", imported, "s", repeat=repeat)
        with bench_kernel() as kernel:
            load = kernel.start("%load_ext air_nb")
            cell = kernel.start(tool.cell(_FIRST_LINE, _RANKS, kernel.cwd))
            kernel.follow(load, timeout_s=_LIMIT_S)
            kernel.follow(cell, timeout_s=_LIMIT_S)
        last = _last(cell, _LINE, _RANKS)
        total = None if last is None else last + cell.sent_at - load.sent_at
        report.add(case, "first line of all ranks", tool.name, total, "s", repeat=repeat)
        above = None if total is None else total - imported
        report.add(case, "more than one import torch", tool.name, above, "s", repeat=repeat)


def _scaling(report: Report, settings: Settings) -> None:
    tool = AirNb()
    with ready_kernels([tool], 1) as kernels:
        for repeat in settings.rounds:
            for ranks in _SCALING:
                _first_lines(report, f"{ranks} rank(s), warm", tool, kernels[tool], ranks, repeat)
