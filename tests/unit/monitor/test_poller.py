"""The poller on a clock of the test's, without sleeping; `test_poller_driver.py` has the real one on the stub."""

import gc
import logging
import os
import queue
import signal
import threading
import tracemalloc
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from air_nb.monitor.gpu_report import DriverState, GpuReport, GpuSample
from air_nb.monitor.host import HostSample
from air_nb.monitor.poller import Poller, PollerStatus

START = datetime(2026, 11, 29, 16, 0, tzinfo=UTC)
HOURS = 3600


@dataclass
class World:
    """The clock, the GPUs and the machine, and what the poller did; its `_step` is called instead of its thread."""

    now: float = 0.0
    is_run_live: bool = False
    error: Exception | None = None
    gpus: int = 8
    samples: list[float] = field(default_factory=list)
    snapshots: list[Any] = field(default_factory=list)
    statuses: list[Any] = field(default_factory=list)

    def clock(self):
        return self.now

    def is_live(self):
        return self.is_run_live

    def at(self):
        return START + timedelta(seconds=self.now)

    def sample(self):
        self.samples.append(self.now)
        if self.error is not None:
            raise self.error
        gpus = tuple(GpuSample(index, f"GPU-{index}", utilization_percent=index) for index in range(self.gpus))
        return GpuReport(self.at(), DriverState.OK, gpus=gpus)

    @property
    def host(self):
        return Machine(self)

    def run(self, poller, seconds):
        """Let time pass as the thread would."""
        end = self.now + seconds
        while True:
            wait_s = poller._step()
            if wait_s is None or self.now + wait_s >= end:
                self.now = end
                return
            self.now += wait_s


@dataclass
class Machine:
    world: World

    def sample(self):
        return HostSample(self.world.at(), 10.0, memory_used_bytes=1, memory_total_bytes=2)


@pytest.fixture
def world():
    return World()


@pytest.fixture
def poller(world, monkeypatch):
    monkeypatch.setattr(Poller, "_start", lambda self: None)
    return make_poller(world)


def make_poller(world, **options):
    return Poller(
        world,
        on_sample=world.snapshots.append,
        on_status=world.statuses.append,
        is_run_live=world.is_live,
        host=world.host,
        clock=world.clock,
        **options,
    )


def test_nothing_is_sampled_and_nothing_wakes_while_nobody_looks(world, poller):
    assert poller._step() is None
    assert (world.samples, poller.latest) == ([], None)
    assert poller.status() == PollerStatus("paused", 10.0, "no page shows the panel")


def test_a_view_that_becomes_active_gets_values_at_once_and_then_every_interval(world, poller):
    poller.tell("a", "active")
    world.run(poller, 35)
    assert world.samples == [0, 10, 20, 30]
    assert [snapshot.polled_at for snapshot in world.snapshots] == [START + timedelta(seconds=s) for s in world.samples]
    assert (world.snapshots[-1], len(poller.history)) == (poller.latest, 4)
    assert world.statuses == [PollerStatus("polling", 10.0, "the panel is in sight")]


@pytest.mark.parametrize("state", ["hidden", "idle", "gone"])
def test_it_pauses_out_of_sight_and_samples_at_once_when_seen_again(world, poller, state):
    poller.tell("a", "active")
    world.run(poller, 12)
    poller.tell("a", state)
    assert poller._step() is None
    world.run(poller, 1000)
    assert world.samples == [0, 10]
    poller.tell("a", "active")
    world.run(poller, 5)
    assert world.samples == [0, 10, 1012]
    assert [status.status for status in world.statuses] == ["polling", "paused", "polling"]


def test_a_glance_away_does_not_delay_the_values(world, poller):
    poller.tell("a", "active")
    world.run(poller, 2)
    poller.tell("a", "hidden")
    world.run(poller, 2)
    poller.tell("a", "active")
    world.run(poller, 12)
    assert world.samples == [0, 4, 14]


def test_a_beat_of_an_active_view_is_no_reason_to_sample(world, poller):
    poller.tell("a", "active")
    world.run(poller, 4)
    poller.tell("a", "active")
    world.run(poller, 4)
    assert world.samples == [0]


def test_a_page_that_went_without_a_word_is_polled_for_the_idle_time_only(world, poller):
    poller.tell("a", "active")
    world.run(poller, 24 * HOURS)
    assert world.samples == list(range(0, 300, 10))
    assert world.statuses[-1].status == "paused"


def test_the_history_fills_while_a_run_is_live_though_nobody_looks(world, poller):
    world.is_run_live = True
    poller.wake()
    world.run(poller, 25)
    assert world.samples == [0, 10, 20]
    assert world.statuses == [PollerStatus("polling", 10.0, "a run is live")]
    world.is_run_live = False
    world.run(poller, 1000)
    assert world.samples == [0, 10, 20]
    assert poller._step() is None


def test_a_refresh_samples_at_once_even_when_paused(world, poller):
    assert poller.refresh() is None
    assert poller._step() is None
    assert world.samples == [0]
    assert poller.refresh() is poller.latest
    poller._step()
    assert world.samples == [0, 0]


def test_after_a_refresh_the_next_poll_is_an_interval_later(world, poller):
    poller.tell("a", "active")
    world.run(poller, 7)
    poller.refresh()
    world.run(poller, 20)
    assert world.samples == [0, 7, 17]


def test_the_interval_can_be_changed_within_bounds(world, poller):
    poller.tell("a", "active")
    world.run(poller, 5)
    poller.set_interval(60)
    world.run(poller, 120)
    assert world.samples == [0, 60, 120]
    poller.set_interval(1)
    world.run(poller, 3)
    assert world.samples[3:] == [125, 126, 127]
    assert [status.interval_s for status in world.statuses] == [10, 60, 1]
    for refused in (0.5, 601, float("nan")):
        with pytest.raises(ValueError, match="1 to 600 s"):
            poller.set_interval(refused)


def test_an_unknown_state_of_a_view_is_refused(poller):
    with pytest.raises(ValueError, match="asleep"):
        poller.tell("a", "asleep")


def test_a_callback_that_raises_is_reported_once_and_polling_goes_on(world, monkeypatch, caplog):
    monkeypatch.setattr(Poller, "_start", lambda self: None)

    def fail(_value):
        raise LookupError("the page has gone")

    poller = Poller(world, on_sample=fail, on_status=fail, host=world.host, clock=world.clock)
    poller.tell("a", "active")
    with caplog.at_level(logging.ERROR, logger="traitlets"):
        world.run(poller, 30)
    assert world.samples == [0, 10, 20]
    assert len(poller.history) == 3
    assert [record.exc_info[1].args for record in caplog.records] == [("the page has gone",)]


def test_a_sampler_that_raises_is_reported_and_polling_goes_on(world, poller, caplog):
    poller.tell("a", "active")
    world.error = broken = RuntimeError("no more processes")
    with caplog.at_level(logging.ERROR, logger="traitlets"):
        world.run(poller, 25)
    world.error = None
    world.run(poller, 10)
    assert world.samples == [0, 10, 20, 30]
    assert [snapshot.polled_at for snapshot in world.snapshots] == [START + timedelta(seconds=30)]
    assert [record.exc_info[1] for record in caplog.records] == [broken]


def test_a_callback_that_asks_for_runs_and_raises_does_not_stop_it_either(world, monkeypatch):
    monkeypatch.setattr(Poller, "_start", lambda self: None)
    monkeypatch.setattr(world, "is_live", lambda: 1 // 0)
    poller = make_poller(world)
    assert poller._step() == 10.0


def test_a_day_in_front_of_the_panel_does_not_grow_memory(world, poller):
    poller._on_sample = lambda snapshot: None
    poller._on_status = lambda status: None

    def watch(hours):
        for _ in range(hours * HOURS // 60):
            poller.tell(f"page-{world.now}", "active")  # a page that is reloaded every minute
            world.run(poller, 60)
        polled = len(world.samples)
        world.samples.clear()
        gc.collect()
        return polled, tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        _, after_3_h = watch(3)
        polled, after_24_h = watch(21)
    finally:
        tracemalloc.stop()
    assert polled == 21 * 360
    assert after_24_h - after_3_h < 20_000


# ---------------------------------------------------------------------------------------------------- with its thread


@pytest.fixture
def running(world):
    """A poller whose thread waits on real events, at an interval that never comes."""
    poller = make_poller(world, interval_s=600.0)
    yield poller
    poller.stop()


def monitor_threads():
    return [thread for thread in threading.enumerate() if thread.name == "air_nb-monitor"]


def test_the_thread_starts_with_the_first_need_and_ends_with_stop(running):
    assert monitor_threads() == []
    assert running.refresh(wait_s=30).report.driver_state is DriverState.OK
    running.refresh(wait_s=30)
    assert len(monitor_threads()) == 1
    running.stop()
    running.stop()
    assert monitor_threads() == []
    running.wake()
    running.tell("a", "active")
    assert running.refresh(wait_s=30) is running.latest  # at once: nothing will come
    assert monitor_threads() == []


def test_what_was_stopped_before_it_was_needed_never_starts(running):
    running.stop()
    running.tell("a", "active")
    assert running.refresh(wait_s=30) is None
    assert running._thread is None


def test_a_refresh_waits_for_its_own_sample_and_no_longer_than_it_may(world):
    begun, may_end = threading.Event(), threading.Event()

    class Slow(World):
        def sample(self):
            begun.set()
            may_end.wait()
            return super().sample()

    poller = make_poller(Slow())
    try:
        assert poller.refresh(wait_s=0.01) is None
        begun.wait()
        poller.tell("a", "active")
        poller.set_interval(600)
        assert poller.status().status == "polling"  # none of them waits for the driver
        may_end.set()
        assert poller.refresh(wait_s=30) is poller.latest
    finally:
        may_end.set()
        poller.stop()


def test_every_wait_is_for_a_reason(world):
    waits: queue.SimpleQueue[float | None] = queue.SimpleQueue()

    def wait(event, seconds):
        waits.put(seconds)
        event.wait()

    poller = make_poller(world, wait=wait)
    try:
        poller.wake()
        assert waits.get(timeout=30) is None
        poller.tell("a", "active")
        while waits.get(timeout=30) is None:  # once more if the thread had begun before it was woken
            pass
        poller.tell("a", "hidden")
        assert waits.get(timeout=30) is None
        assert waits.empty()
    finally:
        poller.stop()


def test_stop_may_be_called_by_a_callback(world):
    stopped = threading.Event()

    def stop(_snapshot):
        pollers[0].stop()
        stopped.set()

    pollers = [Poller(world, on_sample=stop, host=world.host)]
    pollers[0].refresh()
    assert stopped.wait(30)
    pollers[0].stop()


def test_a_forked_child_polls_nothing_and_waits_for_nothing(running):
    running.refresh(wait_s=30)
    held, may_end = threading.Event(), threading.Event()

    def hold():
        with running._lock:
            held.set()
            may_end.wait()

    holder = threading.Thread(target=hold)  # the lock may be another thread's at the moment of the fork
    holder.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(60)  # a lock that is still held is waited for without end
        latest = running.refresh(wait_s=30)
        running.stop()
        os._exit(0 if latest is not None and running._thread is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    may_end.set()
    holder.join()
    assert running.refresh(wait_s=30) is not None
