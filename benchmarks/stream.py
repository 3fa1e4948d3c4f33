"""From a print in a rank to the client: how late, how fast, and what is lost."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from benchmarks.harness import BenchKernel, Cell, arrivals
from benchmarks.measure import percentile
from benchmarks.report import Report, Settings
from benchmarks.tools import AirNb, Tool, Torchrun, ready_kernels

__all__ = ["run"]

_LIMIT_S = 240.0
_FLOOD_RANKS = 4
_STAMP = re.compile(r"<(\d+) (\d+) (\d+\.\d+)>")
_FLOOD_LINE = re.compile(r"<\d \d{6} x{88}>")


class _AllLines(AirNb):
    name = "air_nb --output all"


class _Kernel(Tool):
    """The kernel's own print, as if it were the ranks one after the other."""

    name = "kernel's print"

    def cell(self, code: str, ranks: int, directory: Path) -> str:  # noqa: ARG002 - needs no file
        return f"for rank in range({ranks}):\n" + textwrap.indent(code, "    ")


class _FlushingKernel(_Kernel):
    name = "kernel's print, flush=True"

    def cell(self, code: str, ranks: int, directory: Path) -> str:
        return super().cell(code.replace("flush=False", "flush=True"), ranks, directory)


def run(settings: Settings) -> Report:
    """Measure latency and throughput."""
    report = Report("stream", baselines=("torchrun", "kernel's print"))
    tools = [AirNb(), _AllLines("--output all"), _Kernel(), _FlushingKernel(), Torchrun()]
    with ready_kernels(tools, _FLOOD_RANKS) as kernels:
        for repeat in settings.rounds:
            for ranks in (1, _FLOOD_RANKS):
                for tool, kernel in kernels.items():
                    _latency(report, tool, kernel, ranks, repeat, lines=8 if settings.quick else 40)
            for tool, kernel in kernels.items():
                if not isinstance(tool, _FlushingKernel):
                    _throughput(report, tool, kernel, repeat, lines=2_000 if settings.quick else 50_000)
    return report


def _latency(report: Report, tool: Tool, kernel: BenchKernel, ranks: int, repeat: int, *, lines: int) -> None:
    """Lines with the time at which they were printed, at random moments; every process has the same clock."""
    code = f"""import random, time
random.seed(rank)
for number in range({lines}):
    time.sleep(random.uniform(0.06, 0.14))
    print(f"<{{rank}} {{number}} {{time.monotonic():.6f}}>", flush=False)
"""
    cell = kernel.run(tool.cell(code, ranks, kernel.cwd), _LIMIT_S)
    case = f"print to client, {ranks} rank{'s' if ranks > 1 else ''}"
    delays = []
    for text, at in arrivals(cell, _STAMP).items():
        match = _STAMP.fullmatch(text)
        assert match is not None
        delays.append(1000 * (at - float(match.group(3))))
    report.add(case, "missing lines", tool.name, ranks * lines - len(delays), repeat=repeat)
    if delays:
        report.add(case, "median", tool.name, percentile(delays, 0.5), "ms", repeat=repeat)
        report.add(case, "p95", tool.name, percentile(delays, 0.95), "ms", repeat=repeat)


def _throughput(report: Report, tool: Tool, kernel: BenchKernel, repeat: int, *, lines: int) -> None:
    """Lines of 100 bytes as fast as they can be printed."""
    code = f"""pad = "x" * 88
for number in range({lines}):
    print(f"<{{rank}} {{number:06d}} {{pad}}>")
"""
    before = kernel.memory_mb("VmRSS")
    kernel.reset_peak()
    cell = kernel.run(tool.cell(code, _FLOOD_RANKS, kernel.cwd), _LIMIT_S)
    case = f"{_FLOOD_RANKS} ranks x {lines} lines of 100 B"
    kept = _lines_in_files(kernel.last_run()) if isinstance(tool, AirNb) else _lines_shown(cell)
    report.add(case, "cell done", tool.name, cell.idle_at - cell.sent_at, "s", repeat=repeat)
    report.add(case, "lost or garbled lines", tool.name, _FLOOD_RANKS * lines - kept, repeat=repeat)
    report.add(case, "text at the client", tool.name, len(cell.stream()) / 1e6, "MB", repeat=repeat)
    report.add(case, "kernel memory, peak growth", tool.name, kernel.memory_mb("VmHWM") - before, "MB", repeat=repeat)


def _lines_in_files(run: Path) -> int:
    return sum(len(set(_FLOOD_LINE.findall(path.read_text()))) for path in run.glob("rank_*.out"))


def _lines_shown(cell: Cell) -> int:
    """Whole lines at the client; two that ran into each other are garbled."""
    lines = cell.stream().replace("\r\n", "\n").split("\n")
    return len({line for line in lines if _FLOOD_LINE.fullmatch(line)})
