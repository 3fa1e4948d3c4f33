"""A hub with a page that keeps what it hears, a monitor and actions that do what the test says, and a clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from air_nb.monitor.gpu_report import DriverState, GpuProcess, GpuReport, GpuSample
from air_nb.monitor.history import History
from air_nb.monitor.holders import Holder, HolderKind
from air_nb.monitor.host import HostSample
from air_nb.monitor.poller import PollerStatus, Snapshot
from air_nb.monitor.presence import ViewState
from air_nb.sidebar.hub import Hub
from air_nb.sidebar.messages import Facts
from air_nb.sidebar.rows import CheckpointRow, LogChunk, RootRows, RunRow


def run_row(**changes: Any) -> RunRow:
    """A run that has ended."""
    fields: dict[str, Any] = {"run_id": "r1", "name": "swift-otter", "state": "FINISHED", "is_live": False}
    fields |= {"is_mine": True, "notebook": "train.ipynb", "nproc": 2, "device": "cpu", "created_at": 1.0}
    fields |= {
        "started_at": 2.0,
        "ended_at": 3.0,
        "reason": "",
        "line": "done",
        "figures": "",
        "link": None,
        "can_resume": True,
    }
    return RunRow(**(fields | changes))


def checkpoint_row(**changes: Any) -> CheckpointRow:
    """A committed checkpoint that nobody has verified."""
    fields: dict[str, Any] = {"path": "/ck/step-1", "step": 1, "created_at": 1.0, "size_bytes": 10}
    fields |= {"state": "committed", "verified": None, "verifying": False, "problem": "", "run_id": "r1"}
    return CheckpointRow(**(fields | {"run_name": "swift-otter", "can_resume": True} | changes))


def snapshot(at: float = 100.0, utilization: int | None = 50, **changes: Any) -> Snapshot:
    """One GPU, held by a rank."""
    now = datetime.fromtimestamp(at, UTC)
    gpu = GpuSample(
        index=0, uuid="GPU-a", name="H100", utilization_percent=utilization, processes=(GpuProcess(7, used_bytes=1),)
    )
    report = GpuReport(now, DriverState.OK, driver_version="570", gpus=(gpu,))
    holders = {7: Holder(7, HolderKind.RANK, "rank 0 of swift-otter", "r1", 0)}
    fields: dict[str, Any] = {"report": report, "host": HostSample(now, cpu_percent=1.0, cpu_count=2)}
    return Snapshot(**(fields | {"holders": holders, "polled_at": now} | changes))


class FakePoller:
    """The monitor as the hub sees it."""

    def __init__(self) -> None:
        self.history = History()
        self.latest: Snapshot | None = None
        self.idle_s = 300.0
        self.interval_s = 10.0
        self.views: dict[str, ViewState] = {}
        self.refreshed = 0

    def status(self) -> PollerStatus:
        if ViewState.ACTIVE in self.views.values():
            return PollerStatus("polling", self.interval_s, "the panel is in sight")
        return PollerStatus("paused", self.interval_s, "no page shows the panel")

    def tell(self, view: str, state: ViewState) -> None:
        self.views[view] = state

    def refresh(self) -> None:
        self.refreshed += 1

    def set_interval(self, seconds: float) -> None:
        self.interval_s = seconds


class FakeActions:
    """Rows that the test sets; requests that it may hold up or make fail."""

    def __init__(self) -> None:
        self.run_rows: list[RunRow] = [run_row()]
        self.root_rows: list[RootRows] = [RootRows("/ck", "", (checkpoint_row(),))]
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[Any, ...]] = []

    def _do(self, *call: Any) -> None:
        self.calls.append(call)
        self.gate.wait(30)
        if self.failure is not None:
            raise self.failure

    def runs(self) -> list[RunRow]:
        if self.failure is not None:
            raise self.failure
        return self.run_rows

    def checkpoints(self) -> list[RootRows]:
        return self.root_rows

    def stop(self, run_id: str) -> str:
        self._do("stop", run_id)
        return f"run {run_id} was stopped"

    def log(self, run_id: str, rank: int, offset: int) -> LogChunk:
        self._do("log", run_id, rank, offset)
        return LogChunk(run_id, rank, 0, 5, "hello", is_end=True)

    def resume(self, run_id: str, path: str) -> str:
        self._do("resume", run_id, path)
        return "r2"

    def verify(self, path: str) -> str:
        self._do("verify", path)
        return f"{path} is good"

    def close(self) -> None:
        self.calls.append(("close",))


@dataclass
class Page:
    """What a page has heard; a transport that can break."""

    hub: Hub
    heard: list[dict[str, Any]] = field(default_factory=list)
    is_hung_up: bool = False
    is_broken: bool = False
    connection: Any = None

    def open(self) -> Page:
        self.connection = self.hub.connect(self._transmit, self._hang_up)
        self.hub.greet(self.connection)
        return self

    def say(self, **message: Any) -> None:
        self.hub.receive(self.connection, message)

    def kinds(self) -> list[str]:
        return [each["type"] for each in self.heard]

    def last(self, kind: str) -> dict[str, Any]:
        return next(each for each in reversed(self.heard) if each["type"] == kind)

    def _transmit(self, message: dict[str, Any]) -> None:
        if self.is_broken:
            raise OSError("the page has gone")
        self.heard.append(message)

    def _hang_up(self) -> None:
        self.is_hung_up = True


@dataclass
class Clock:
    """Monotonic seconds that the test moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def poller() -> FakePoller:
    return FakePoller()


@pytest.fixture
def actions() -> FakeActions:
    return FakeActions()


@pytest.fixture
def hub(poller, actions, clock) -> Iterator[Hub]:
    made = Hub(actions, Facts("k1", 42, "host", "0.1"), clock=clock)
    made.attach(poller)
    yield made
    actions.gate.set()
    made.close()


@pytest.fixture
def open_page(hub) -> Callable[[], Page]:
    return lambda: Page(hub).open()


@pytest.fixture
def page(open_page) -> Page:
    opened: Page = open_page()
    return opened
