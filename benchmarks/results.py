"""A large array back from every rank, against writing and mapping the same bytes in the same directory."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from pathlib import Path

from benchmarks.harness import BenchKernel
from benchmarks.report import Report, Settings
from benchmarks.tools import AirNb, Tool, Torchrun, ready_kernels

__all__ = ["run"]

_RANKS = 4
_LIMIT_S = 240.0
_FLOOR = "write and map"
_ALONE = "more than the same cell with one number"


class _WithValue(AirNb):
    """The cell's last expression comes back."""

    def __init__(self) -> None:
        super().__init__("--out arrays")


class _ThroughFiles(Torchrun):
    """Each rank saves its array, the notebook loads the files."""

    def cell(self, code: str, ranks: int, directory: Path) -> str:
        save = f'{code}\nnp.save(f"{directory}/array_{{rank}}.npy", array)\n'
        load = f'import numpy as np\narrays = [np.load("{directory}/array_%d.npy" % rank) for rank in range({ranks})]'
        return f"{super().cell(save, ranks, directory)}\n{load}"


def run(settings: Settings) -> Report:
    """Measure a cell that returns the arrays, one that returns small ones, and the floor."""
    report = Report("results", baselines=("torchrun", _FLOOR))
    megabytes = 10 if settings.quick else 100
    case = f"{megabytes} MB from each of {_RANKS} ranks"
    with ready_kernels([_WithValue(), _ThroughFiles()], _RANKS) as kernels:
        for repeat in settings.rounds:
            for tool, kernel in kernels.items():
                _round_trip(report, case, tool, kernel, megabytes * 125_000, repeat)
            floor = _write_and_map(next(iter(kernels.values())).home, megabytes * 1_000_000)
            report.add(case, _ALONE, _FLOOR, floor, "s", repeat=repeat)
    return report


def _round_trip(report: Report, case: str, tool: Tool, kernel: BenchKernel, numbers: int, repeat: int) -> None:
    small = _seconds(tool, kernel, 1)
    before = kernel.memory_mb("VmRSS")
    kernel.reset_peak()
    large = _seconds(tool, kernel, numbers)
    report.add(case, "cell", tool.name, large, "s", repeat=repeat)
    report.add(case, _ALONE, tool.name, large - small, "s", repeat=repeat)
    kernel.ok(f"assert [a.sum() for a in arrays] == [rank * {numbers} for rank in range({_RANKS})]")
    peak = kernel.memory_mb("VmHWM") - before
    report.add(case, "kernel memory, peak growth, all read once", tool.name, peak, "MB", repeat=repeat)
    kernel.ok("del arrays")


def _seconds(tool: Tool, kernel: BenchKernel, numbers: int) -> float:
    end = "array" if isinstance(tool, AirNb) else ""
    code = f"import numpy as np\narray = np.full({numbers}, float(rank))\n{end}"
    cell = kernel.ok(tool.cell(code, _RANKS, kernel.cwd), timeout_s=_LIMIT_S)
    return cell.idle_at - cell.sent_at


def _write_and_map(directory: Path, size: int) -> float:
    """Seconds in which as many processes write the bytes, and this one maps them."""
    paths = [directory / f"floor_{rank}" for rank in range(_RANKS)]
    context = multiprocessing.get_context("fork")
    data = bytes(size)
    writers = [context.Process(target=path.write_bytes, args=(data,)) for path in paths]
    started = time.monotonic()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    for path in paths:
        _map(path)
    return time.monotonic() - started


def _map(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as mapped:
        assert mapped[0] == mapped[-1] == 0
    os.close(descriptor)
    path.unlink()
