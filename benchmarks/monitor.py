"""What watching 8 GPUs costs: CPU, memory, and bytes to the browser; and how long a poll takes.

The GPUs are those of the tests' libnvidia-ml.so.1, so that all tools can be compared without any; a real driver takes
longer to answer, whoever asks. All panels poll at the same time, each in a server and a kernel of its own, so that the
load of the machine is the same for all; what counts is the CPU time of their processes beyond that of a server, a
kernel and a notebook without a panel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import psutil

from air_nb.monitor.poller import Poller, Snapshot
from air_nb.monitor.sampler import Sampler
from air_nb.sidebar.hub import Hub
from air_nb.sidebar.messages import Facts, Message
from air_nb.sidebar.rows import LogChunk, RootRows, RunRow
from benchmarks.measure import OURS, median, percentile
from benchmarks.panels import PEERS, AirNb, NoPanel, Panel
from benchmarks.report import Report, Settings
from benchmarks.server import cpu_s, sampling_process
from tests.nvml.stub import LIBRARY, SOURCE, FakeNvml

__all__ = ["run"]

_GPUS = 8
_LIMIT_S = 30.0
_SETTLE_S = 3.0  # the burst of a panel that comes into sight
_OFTEN_S = 1.0
_GOAL_PERIOD_S = 10.0

# jupyterlab-nvdashboard asks for more than we do. "Not supported" (3) spares it the work that we don't do.
_MORE_CALLS = """
#define EXPORT __attribute__((visibility("default")))
EXPORT int nvmlDeviceGetNvLinkVersion(void *gpu, unsigned link, unsigned *out) {
    return (void)gpu, (void)link, (void)out, 3;
}
EXPORT int nvmlDeviceGetMaxPcieLinkGeneration(void *gpu, unsigned *out) { return (void)gpu, (void)out, 3; }
"""


def run(settings: Settings) -> Report:
    """Measure all cases."""
    report = Report("monitor", baselines=[peer.name for peer in PEERS])
    with _fake_gpus():
        _panels(report, settings)
        _alone(report, settings)
    return report


@contextmanager
def _fake_gpus() -> Iterator[None]:
    """8 busy H100s for all processes that are started; two processes hold memory of each."""
    with tempfile.TemporaryDirectory(prefix="air_nb_bench_") as directory:
        folder = Path(directory)
        (folder / "more.c").write_text(_MORE_CALLS)
        flags = ["-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}"]
        subprocess.run(["cc", *flags, "-o", folder / LIBRARY, SOURCE, folder / "more.c"], check=True)
        fake = FakeNvml(folder, folder / "state.txt")
        fake.describe(*(line for index in range(_GPUS) for line in _busy_gpu(index)))
        with mock.patch.dict(os.environ, fake.environment):
            yield


def _busy_gpu(index: int) -> Iterator[str]:
    yield f"gpu {index} util {90 + index}"
    yield f"gpu {index} used {40000 + index}"
    yield f"gpu {index} temp {60 + index}"
    yield f"proc {index} {os.getpid()} 30000"
    yield f"proc {index} {os.getppid()} 9000"


# ---------------------------------------------------------------------------------------------------------- panels


@dataclass(frozen=True, slots=True)
class _Used:
    """What a panel took in a window of time.

    Attributes:
        cpu_percent: Part of a core, by process.
        polls: Times that the page got values.
        panel_bytes: See `benchmarks.panels.Seen`.
        notebook_bytes: Likewise.
        seconds: Length of the window.
    """

    cpu_percent: dict[str, float]
    polls: int
    panel_bytes: int
    notebook_bytes: int
    seconds: float

    @property
    def all_cpu_percent(self) -> float:
        """Of all processes."""
        return sum(self.cpu_percent.values())

    @property
    def all_bytes(self) -> int:
        """To the browser."""
        return self.panel_bytes + self.notebook_bytes


def _panels(report: Report, settings: Settings) -> None:
    hidden_s, default_s, often_s = (5.0, 20.0, 5.0) if settings.quick else (20.0, 60.0, 20.0)
    with ExitStack() as stack:
        panels = list(_opened(stack))
        for repeat in settings.rounds:
            for panel in panels:
                panel.hide()
            hidden = _window(panels, hidden_s)
            for panel in panels:
                panel.watch(panel.period_s)
            default = _window(panels, default_s)
            for panel in panels:
                panel.watch(_OFTEN_S)
            often = _window(panels, often_s)
            for name in hidden:
                if name != NoPanel.name:
                    _add(report, name, hidden, default, often, repeat)
    for peer in PEERS:
        if not peer.is_installed():
            case = f"{_GPUS} GPUs, panel in sight"
            report.add(case, "one poll every", peer.name, f"not installed: pip install {peer.name}", "s")


def _opened(stack: ExitStack) -> Iterator[Panel]:
    """All that are here, with nothing left to warm up."""
    panels: list[Panel] = []
    kinds: tuple[type[Panel], ...] = (NoPanel, AirNb, *PEERS)
    for kind in kinds:
        if not kind.is_installed():
            continue
        home = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="air_nb_bench_", ignore_cleanup_errors=True))
        )
        try:
            panel = kind(home / "server")
        except (AssertionError, OSError, RuntimeError) as error:
            if kind not in PEERS:
                raise
            print(f"{kind.name} is installed, but does not work here: {error!r}", file=sys.stderr)
            continue
        stack.callback(panel.close)
        panels.append(panel)
    for panel in panels:
        panel.watch(panel.period_s)
    for panel in panels:
        panel.server.settle()
    yield from panels


def _window(panels: Sequence[Panel], seconds: float) -> dict[str, _Used]:
    time.sleep(_SETTLE_S)
    started = time.monotonic()
    before = [(panel.server.cpu_s(), panel.seen()) for panel in panels]
    time.sleep(seconds)
    after = [(panel.server.cpu_s(), panel.seen()) for panel in panels]
    taken_s = time.monotonic() - started
    used = {}
    for panel, (cpu_before, seen_before), (cpu_after, seen) in zip(panels, before, after, strict=True):
        used[panel.name] = _Used(
            {name: (cpu_after[name] - cpu_before[name]) / taken_s * 100 for name in cpu_after},
            seen.polls - seen_before.polls,
            seen.panel_bytes - seen_before.panel_bytes,
            seen.notebook_bytes - seen_before.notebook_bytes,
            taken_s,
        )
    return used


def _add(
    report: Report,
    name: str,
    hidden: dict[str, _Used],
    default: dict[str, _Used],
    often: dict[str, _Used],
    repeat: int,
) -> None:
    def more(used: dict[str, _Used]) -> float:
        return used[name].all_cpu_percent - used[NoPanel.name].all_cpu_percent

    case, used = f"{_GPUS} GPUs, panel in sight", default[name]
    assert used.polls, f"{name} shows no values"
    report.add(case, "one poll every", name, used.seconds / used.polls, "s", repeat=repeat)
    report.add(case, "CPU", name, more(default), "% of a core", repeat=repeat)
    report.add(case, "to the browser", name, used.all_bytes / used.seconds * 60 / 1000, "kB/min", repeat=repeat)

    case, used = f"{_GPUS} GPUs, one poll", often[name]
    polls_per_s = used.polls / used.seconds
    idle = hidden[name].cpu_percent
    per_poll = {each: (used.cpu_percent[each] - idle[each]) / polls_per_s * 10 for each in idle}  # ms
    for each, milliseconds in per_poll.items():
        if each == "server" or name == OURS:
            report.add(case, f"CPU of the {each}", name, milliseconds, "ms", repeat=repeat)
    total = sum(per_poll.values())
    report.add(case, "CPU in all", name, total, "ms", repeat=repeat)
    part = total / 1000 / _GOAL_PERIOD_S * 100
    report.add(case, f"CPU in all, if every {_GOAL_PERIOD_S:g} s", name, part, "% of a core", repeat=repeat)
    report.add(case, "to the panel", name, used.panel_bytes / used.polls, "bytes", repeat=repeat)
    report.add(case, "to the browser in all", name, used.all_bytes / used.polls, "bytes", repeat=repeat)

    report.add(f"{_GPUS} GPUs, panel out of sight", "CPU", name, more(hidden), "% of a core", repeat=repeat)


# -------------------------------------------------------------------------------------------------------- ours alone


class _NoRuns:
    """A session in which nothing was ever launched."""

    def runs(self) -> list[RunRow]:
        return []

    def checkpoints(self) -> list[RootRows]:
        return []

    def stop(self, run_id: str) -> str:
        raise LookupError(run_id)

    def log(self, run_id: str, rank: int, offset: int) -> LogChunk:
        raise LookupError(run_id, rank, offset)

    def resume(self, run_id: str, path: str) -> str:
        raise LookupError(run_id, path)

    def verify(self, path: str) -> str:
        raise LookupError(path)

    def close(self) -> None:
        pass


def _alone(report: Report, settings: Settings) -> None:
    for repeat in settings.rounds:
        hub = Hub(_NoRuns(), Facts("", os.getpid(), "", ""))
        with Sampler() as sampler:
            poller = Poller(sampler, on_sample=hub.on_sample, on_status=hub.on_status)
            hub.attach(poller)
            try:
                _sampling_process(report, repeat, poller)
                _polls(report, repeat, poller, 20 if settings.quick else 100)
                _new_page(report, repeat, poller, hub)
            finally:
                poller.stop()
                hub.close()


def _refreshed(poller: Poller) -> Snapshot:
    snapshot = poller.refresh(_LIMIT_S)
    assert snapshot is not None, f"no sample in {_LIMIT_S:g} s"
    assert len(snapshot.report.gpus) == _GPUS, snapshot.report
    return snapshot


def _sampling_process(report: Report, repeat: int, poller: Poller) -> None:
    case = "the sampling process"
    started = time.monotonic()
    _refreshed(poller)
    report.add(case, "start to the first sample", OURS, time.monotonic() - started, "s", repeat=repeat)
    process = sampling_process(psutil.Process())
    assert process is not None, "it has answered"
    report.add(case, "CPU of its start", OURS, cpu_s(process.pid), "s", repeat=repeat)
    report.add(case, "memory (PSS)", OURS, process.memory_full_info().pss / 1e6, "MB", repeat=repeat)


def _polls(report: Report, repeat: int, poller: Poller, times: int) -> None:
    """Time from asking to the values, on the poller's thread: GPUs, machine, whose processes, history."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        _refreshed(poller)
        taken.append((time.perf_counter() - started) * 1000)
    report.add("one poll after the other", "median", OURS, median(taken), "ms", repeat=repeat)
    report.add("one poll after the other", "95th percentile", OURS, percentile(taken, 0.95), "ms", repeat=repeat)


def _new_page(report: Report, repeat: int, poller: Poller, hub: Hub) -> None:
    """All that a page is told when it comes, with a history that is full."""
    last = _refreshed(poller)
    ring = poller.history
    for back in range(ring.points + 1, 0, -1):
        earlier = timedelta(seconds=-back * _GOAL_PERIOD_S)
        ring.add(replace(last.report, at=last.report.at + earlier), replace(last.host, at=last.host.at + earlier))
    sizes: list[int] = []

    def transmit(message: Message) -> None:
        sizes.append(len(json.dumps(message)))

    connection = hub.connect(transmit, lambda: None)
    started = time.perf_counter()
    hub.greet(connection)
    case = f"a new page, {_GPUS} GPUs x {len(ring)} points"
    report.add(case, "until all is sent", OURS, (time.perf_counter() - started) * 1000, "ms", repeat=repeat)
    report.add(case, "to the panel", OURS, sum(sizes) / 1000, "kB", repeat=repeat)
