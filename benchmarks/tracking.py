"""What tracking costs: at launch, per call, and while a server does not answer; and whether all of it arrives."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from benchmarks.harness import BenchKernel, Cell, arrivals, bench_kernel, settle
from benchmarks.report import Report, Settings
from benchmarks.tools import AirNb
from tests.support.mlflow_servers import silent_server
from tests.support.mlflow_stores import sqlite_store

__all__ = ["run"]

_RANKS = 8
_PAIRS = 4
_TRAINING_RANKS = 2
_LIMIT_S = 400.0
_POLL_S = 0.05
_LINE = re.compile(r"<line of rank \d+>")
_LOOP = re.compile(r"<loop from (\d+\.\d+) to (\d+\.\d+)>")
_RATE = re.compile(r"<(\d+\.\d+) steps/s>")
_CALL = re.compile(r"<([\w.]+): (\d+\.\d+) us>")

_LOGS = {
    "mlflow.log_metric": 'mlflow.log_metric("loss", value, step=number)',
    "runtime.log_metrics": 'log_metrics({"loss": value}, step=number)',
}
_PRINT = 'print(f"<line of rank {rank}>", flush=True)\n'
_ONE_CALL = "one call"
_PLAIN = "one plain process"
_UNTRACKED = "--no-mlflow"


class _Untracked(AirNb):
    """The same cell without tracking."""

    name = _UNTRACKED

    def __init__(self) -> None:
        super().__init__(_UNTRACKED)


def run(settings: Settings) -> Report:
    """Measure all cases."""
    report = Report("tracking", baselines=(_UNTRACKED, _PLAIN))
    with _tracked_kernel() as kernel:
        _launch(report, settings, kernel)
        _throughput(report, settings, kernel)
        _calls(report, settings, kernel)
    _silent(report, settings)
    return report


@contextmanager
def _tracked_kernel(uri: str | None = None) -> Iterator[BenchKernel]:
    """Everything warm, and the store made, if it is the default one: ``mlflow.db`` in the kernel's directory."""
    with bench_kernel({"MLFLOW_TRACKING_URI": uri} if uri else None) as kernel:
        AirNb().prepare(kernel, _RANKS)
        yield kernel


def _in_turn(repeat: int) -> Sequence[AirNb]:
    tools = [AirNb(), _Untracked()]
    return tools if repeat % 2 == 0 else tools[::-1]


# ---------------------------------------------------------------------------------------------------------- launch


def _launch(report: Report, settings: Settings, kernel: BenchKernel) -> None:
    importing = f"import mlflow\n{_PRINT}"
    often = [(f"{_RANKS} ranks, warm", _PRINT, _RANKS), ("1 rank that imports MLflow", importing, 1)]
    cases = often * (1 if settings.quick else _PAIRS)  # small differences, and cheap
    cases.append((f"{_RANKS} ranks that import MLflow", importing, _RANKS))
    for repeat in settings.rounds:
        for number, (case, code, ranks) in enumerate(cases, repeat):
            first = {tool.name: _first_line(kernel, tool, code, ranks) for tool in _in_turn(number // 2)}
            for name, seconds in first.items():
                report.add(case, "first line of all ranks", name, seconds, "s", repeat=repeat, limit=_LIMIT_S)
            tracked, untracked = first[AirNb.name], first[_UNTRACKED]
            more = None if tracked is None or untracked is None else (tracked - untracked) * 1000
            report.add(case, "more than untracked", AirNb.name, more, "ms", repeat=repeat)


def _first_line(kernel: BenchKernel, tool: AirNb, code: str, ranks: int) -> float | None:
    """Seconds until every rank's line was shown; nothing of the run before still works in the background."""
    settle(kernel)
    cell = kernel.ok(tool.cell(code, ranks, kernel.cwd), timeout_s=_LIMIT_S)
    times = arrivals(cell, _LINE)
    return max(times.values()) - cell.sent_at if len(times) == ranks else None


# ------------------------------------------------------------------------------------------------------ throughput


def _throughput(report: Report, settings: Settings, kernel: BenchKernel) -> None:
    """From all ranks at once into the default store, and the same number from one process without us."""
    calls = 50 if settings.quick else 1000
    case = f"{_RANKS} ranks x {calls} log_metric, sqlite"
    for repeat in settings.rounds:
        ranks_done, stored, lost = _log_from_ranks(kernel, calls)
        report.add(case, "until the loops are done", AirNb.name, ranks_done, "s", repeat=repeat)
        report.add(case, "until all is in the store", AirNb.name, stored, "s", repeat=repeat, limit=_LIMIT_S)
        report.add(case, "rows lost", AirNb.name, float(lost), repeat=repeat)
        plain = _plain_loop(_RANKS * calls)
        for what in ("until the loops are done", "until all is in the store"):
            report.add(case, what, _PLAIN, plain, "s", repeat=repeat)
        report.add(_ONE_CALL, "mlflow.log_metric", _PLAIN, plain / (_RANKS * calls) * 1e6, "us", repeat=repeat)


def _loop(calls: int) -> str:
    return f"""started = time.time()
for step in range({calls}):
    mlflow.log_metric(f"loss_{{rank}}", 1 / (step + 1), step=step)
print(f"<loop from {{started:.3f}} to {{time.time():.3f}}>", flush=True)
"""


def _log_from_ranks(kernel: BenchKernel, calls: int) -> tuple[float, float | None, int]:
    """Seconds until the loops were done, until the store had every row (None if it never had), and rows missing."""
    settle(kernel)
    database = kernel.cwd / "mlflow.db"
    wanted = _rows(database) + _RANKS * calls
    code = f"{AirNb.group}import time, mlflow\ndist.barrier()\n{_loop(calls)}"
    cell = kernel.start(AirNb("--output all").cell(code, _RANKS, kernel.cwd))
    stored_at = _when_stored(kernel, cell, database, wanted)
    kernel.follow(cell, timeout_s=_LIMIT_S)
    loops = [(float(start), float(end)) for start, end in _LOOP.findall(cell.text)]
    assert cell.reply_status == "ok", cell.text
    assert len(loops) == _RANKS, cell.text
    started = min(start for start, _ in loops)
    done = max(end for _, end in loops) - started
    return done, stored_at and stored_at - started, wanted - _rows(database)


def _when_stored(kernel: BenchKernel, cell: Cell, database: Path, wanted: int) -> float | None:
    """Time (``time.time``) at which the store had the wanted number of rows."""
    end = time.monotonic() + _LIMIT_S
    kernel.follow(cell, until=lambda _: _rows(database) >= wanted, timeout_s=_LIMIT_S)
    while time.monotonic() < end:
        if _rows(database) >= wanted:
            return time.time()
        time.sleep(_POLL_S)
    return None


def _rows(database: Path) -> int:
    """Rows of the loops; the metrics of the system are there, too."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        return int(connection.execute("SELECT count(*) FROM metrics WHERE key LIKE 'loss_%'").fetchone()[0])


def _plain_loop(calls: int) -> float:
    """Seconds of the same loop in a process of its own: MLflow as it comes, into a store of its own."""
    with tempfile.TemporaryDirectory(prefix="air_nb_bench_") as directory:
        setup = f'rank = 0\nimport time, mlflow\nmlflow.set_tracking_uri("{sqlite_store(Path(directory))}")\n'
        code = f"{setup}mlflow.start_run()\n{_loop(calls)}"
        plain = subprocess.run(
            [sys.executable, "-c", code], cwd=directory, check=True, capture_output=True, text=True, timeout=_LIMIT_S
        )
        match = _LOOP.search(plain.stdout)
        assert match, plain.stdout
        return float(match.group(2)) - float(match.group(1))


# ------------------------------------------------------------------------------------------------------- each call


def _calls(report: Report, settings: Settings, kernel: BenchKernel) -> None:
    """What a call costs the rank that makes it."""
    count = 100 if settings.quick else 2000
    code = f"""import time, mlflow
from air_nb.runtime import log_metrics
mlflow.active_run()
def timed(name, call):
    started = time.perf_counter()
    for step in range({count}):
        call(step)
    print(f"<{{name}}: {{(time.perf_counter() - started) / {count} * 1e6:.2f}} us>", flush=True)
timed("mlflow.log_metric", lambda step: mlflow.log_metric("a", step, step=step))
timed("runtime.log_metrics", lambda step: log_metrics({{"b": step}}, step=step))
"""
    for repeat in settings.rounds:
        settle(kernel)
        cell = kernel.ok(AirNb().cell(code, 1, kernel.cwd), timeout_s=_LIMIT_S)
        for name, microseconds in _CALL.findall(cell.text):
            report.add(_ONE_CALL, name, AirNb.name, float(microseconds), "us", repeat=repeat)


# ----------------------------------------------------------------------------------------- a server that is silent


def _silent(report: Report, settings: Settings) -> None:
    """Training loops that log every step, and their like that logs nothing; and when a cell starts at all."""
    unreached = "a server that never answers"
    with silent_server() as culprit, _tracked_kernel(culprit.uri) as kernel:
        for repeat in settings.rounds:
            for how, log in _LOGS.items():
                for tool in _in_turn(repeat):
                    chosen = log if tool.name == AirNb.name else "pass"
                    code = _training(tool.group, 30 if settings.quick else 300, chosen)
                    cell = kernel.ok(tool.cell(code, _TRAINING_RANKS, kernel.cwd), timeout_s=_LIMIT_S)
                    match = _RATE.search(cell.text)
                    rate = float(match.group(1)) if match else None
                    case = f"DDP loop, {_TRAINING_RANKS} ranks, {unreached}"
                    report.add(case, f"speed with {how} each step", tool.name, rate, "steps/s", repeat=repeat)
            for tool in _in_turn(repeat):
                seconds = _first_line(kernel, tool, _PRINT, _RANKS)
                case = f"{_RANKS} ranks, warm, {unreached}"
                report.add(case, "first line of all ranks", tool.name, seconds, "s", repeat=repeat)


def _training(group: str, steps: int, log: str) -> str:
    """A loop whose steps take about 20 ms; every kind reads the loss, all ranks of the tracked ones log it."""
    return f"""{group}import time, torch, mlflow
from air_nb.runtime import log_metrics
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
layers = [torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, labels = torch.randn(256, 512), torch.randint(10, (256,))
def step():
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss
def train(steps):
    for number in range(steps):
        value = step().item()
        {log}
train(30)
dist.barrier()
started = time.perf_counter()
train({steps})
if rank == 0:
    print(f"<{{{steps} / (time.perf_counter() - started):.3f}} steps/s>", flush=True)
dist.barrier()
"""
