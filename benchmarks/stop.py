"""How a run ends when something goes wrong: a rank raises, the user interrupts, the kernel is killed."""

from __future__ import annotations

import re
import time

from benchmarks.harness import BenchKernel, Cell, Deaths, arrivals, bench_kernel
from benchmarks.report import Report, Settings
from benchmarks.tools import AirNb, Tool, Torchrun, installed_peers

__all__ = ["run"]

_RANKS = 4
_START_S = 120.0
_LIMIT_S = 45.0
_PIDS = re.compile(r"<pids (\d+) (\d+)>")
_RAISING = re.compile(r"<raising at (\d+\.\d+)>")
_BOOM = re.compile(r"boom on rank 2, y=42")

_ANNOUNCE = 'import os, time\nprint(f"<pids {os.getpid()} {helper}>", flush=True)\n'
_NO_HELPER = "helper = 0\n"
_HELPER = (
    "import subprocess\n"
    'helper = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=subprocess.DEVNULL).pid\n'
)
_LOOP = "while True:\n    time.sleep(0.5)\n"
_DEAF = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
_BARRIER = "if rank == 0:\n    while True:\n        time.sleep(0.5)\ndist.barrier()\n"
_FAILURE = """dist.barrier()
def train_step(x):
    y = 2 * x
    raise ValueError(f"boom on rank {rank}, y={y}")
if rank == 2:
    time.sleep(1.0)
    print(f"<raising at {time.monotonic():.6f}>", flush=True)
    train_step(21)
dist.barrier()
"""


def run(settings: Settings) -> Report:
    """Measure all endings, each in a fresh kernel: a tool may not have come to rest after the one before."""
    report = Report("stop")
    tools: list[Tool] = [AirNb(), Torchrun(), *installed_peers()]
    for repeat in settings.rounds:
        for tool in tools:
            _failure(report, tool, repeat)
        for case, code in (
            ("interrupt in a sleep loop", _NO_HELPER + _ANNOUNCE + _LOOP),
            ("interrupt in a barrier", "{group}" + _NO_HELPER + _ANNOUNCE + _BARRIER),
            ("interrupt, ranks ignore SIGINT and SIGTERM", _DEAF + _NO_HELPER + _ANNOUNCE + _LOOP),
        ):
            for tool in tools:
                _interrupt(report, case, tool, code.replace("{group}", tool.group), repeat)
        for tool in tools:
            _kernel_killed(report, tool, repeat)
    return report


def _start(tool: Tool, kernel: BenchKernel, code: str) -> tuple[Cell, list[int], list[int]]:
    """Run the code until all ranks have said who they are; returns pids of ranks and of what they started."""
    tool.prepare(kernel, _RANKS)
    cell = kernel.start(tool.cell(code, _RANKS, kernel.cwd))
    kernel.follow(cell, until=lambda cell: len(arrivals(cell, _PIDS)) == _RANKS, timeout_s=_START_S)
    pairs = [_PIDS.fullmatch(text) for text in arrivals(cell, _PIDS)]
    pids = [(int(pair.group(1)), int(pair.group(2))) for pair in pairs if pair is not None]
    return cell, [rank for rank, _ in pids], [helper for _, helper in pids if helper]


def _follow(kernel: BenchKernel, cell: Cell) -> None:
    """To the end, or to the limit."""
    try:
        kernel.follow(cell, timeout_s=_LIMIT_S)
    except TimeoutError:
        return


def _failure(report: Report, tool: Tool, repeat: int) -> None:
    case = "rank 2 of 4 raises, the others in a barrier"
    with bench_kernel() as kernel:
        cell, ranks, _ = _start(tool, kernel, tool.group + _NO_HELPER + _ANNOUNCE + _FAILURE)
        deaths = Deaths(ranks)
        _follow(kernel, cell)
        raised = next((float(text.split()[2].rstrip(">")) for text in arrivals(cell, _RAISING)), None)
        shown = arrivals(cell, _BOOM).get("boom on rank 2, y=42")
        gone = deaths.last_at(0.5 if not cell.idle_at else 10.0)
        times = {"error shown": shown, "cell back": cell.idle_at or None, "ranks gone": gone}
        for what, at in times.items():
            value = None if at is None or raised is None else at - raised
            limit = None if cell.idle_at else _LIMIT_S  # a cell that has ended will never show it
            report.add(case, what, tool.name, value, "s", repeat=repeat, limit=limit)
        report.add(case, "cell status", tool.name, cell.reply_status or "still running", repeat=repeat)
        source_shown = 'raise ValueError(f"boom' in cell.text
        report.add(case, "source line shown", tool.name, "yes" if source_shown else "no", repeat=repeat)
        lines = len([line for line in cell.text.splitlines() if line.strip()])
        report.add(case, "lines shown", tool.name, lines, repeat=repeat)


def _interrupt(report: Report, case: str, tool: Tool, code: str, repeat: int) -> None:
    with bench_kernel() as kernel:
        cell, ranks, _ = _start(tool, kernel, code)
        time.sleep(1.0)
        deaths = Deaths(ranks)
        interrupted = time.monotonic()
        kernel.interrupt()
        _follow(kernel, cell)
        back = cell.idle_at - interrupted if cell.idle_at else None
        gone = deaths.last_at(max(0.5, interrupted + _LIMIT_S - time.monotonic()))
        report.add(case, "cell back", tool.name, back, "s", repeat=repeat, limit=_LIMIT_S)
        report.add(
            case,
            "ranks gone",
            tool.name,
            None if gone is None else gone - interrupted,
            "s",
            repeat=repeat,
            limit=_LIMIT_S,
        )
        report.add(case, "cell status", tool.name, cell.reply_status or "still running", repeat=repeat)


def _kernel_killed(report: Report, tool: Tool, repeat: int) -> None:
    limit = 15.0
    with bench_kernel() as kernel:
        _, ranks, helpers = _start(tool, kernel, _HELPER + _ANNOUNCE + _LOOP)
        time.sleep(1.0)
        watched = {"ranks gone": Deaths(ranks), "their setsid children gone": Deaths(helpers)}
        killed = time.monotonic()
        kernel.kill()
        for what, deaths in watched.items():
            at = deaths.last_at(max(0.0, killed + limit - time.monotonic()))
            value = None if at is None else at - killed
            report.add("kernel killed by SIGKILL", what, tool.name, value, "s", repeat=repeat, limit=limit)
