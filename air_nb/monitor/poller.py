"""Polls the GPUs and the machine while somebody looks or a run is live, on one thread of its own.

The thread (``air_nb-monitor``) is the only one that samples, writes the history and calls back. It starts with the
first view or run, sleeps without waking while nothing is wanted, and outlives whatever its callbacks do. A driver call
that hangs costs it the sampler's bound and nobody else anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from air_nb.monitor.gpu_report import GpuReport
from air_nb.monitor.history import History
from air_nb.monitor.holders import Holder, Holders
from air_nb.monitor.host import HostSample, HostSampler
from air_nb.monitor.presence import Presence, ViewState
from air_nb.runs.forked import abandon_in_children

__all__ = ["Poller", "PollerStatus", "Snapshot"]

LEAST_INTERVAL_S = 1.0
MOST_INTERVAL_S = 600.0
_JOIN_S = 5.0  # more than the sampler's bound


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that was seen at one poll.

    Attributes:
        report: The GPUs.
        host: The machine.
        holders: Who the report's processes are, by pid.
        polled_at: Time of the poll (UTC), which is that of its row in the history. `report.at` is older if the driver
            did not answer.
    """

    report: GpuReport
    host: HostSample
    holders: Mapping[int, Holder]
    polled_at: datetime


@dataclass(frozen=True, slots=True)
class PollerStatus:
    """Whether it polls, how often, and why."""

    status: Literal["polling", "paused"]
    interval_s: float
    why: str


class _Samples(Protocol):
    def sample(self) -> GpuReport:
        """See `air_nb.monitor.sampler.Sampler.sample`."""


class _SamplesHost(Protocol):
    def sample(self) -> HostSample:
        """See `HostSampler.sample`."""


class Poller:
    """See the module. Every method may be called from any thread; none waits for the driver but `refresh` and `stop`.

    Args:
        sampler: Samples the GPUs; the caller goes on owning it.
        on_sample: Called with each snapshot, on the poller's thread.
        is_run_live: Whether a run of this kernel is live; asked at each poll, and by `status` on its caller's thread.
        on_status: Called on the poller's thread when it has paused or goes on, or its interval was changed.
        interval_s: Time between polls.
        idle_s: See `Presence`.
        host: Samples the machine.
        clock: Monotonic seconds.
        wait: Waits for an event for at most so many seconds, for ever if None.
    """

    def __init__(
        self,
        sampler: _Samples,
        *,
        on_sample: Callable[[Snapshot], object],
        is_run_live: Callable[[], bool] = lambda: False,
        on_status: Callable[[PollerStatus], object] = lambda _status: None,
        interval_s: float = 10.0,
        idle_s: float = 300.0,
        host: _SamplesHost | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float | None], object] = threading.Event.wait,
    ) -> None:
        self.history = History()
        self._sampler = sampler
        self._host = host or HostSampler()
        self._holders = Holders()
        self._on_sample = on_sample
        self._on_status = on_status
        self._is_run_live = is_run_live
        self._interval_s = interval_s
        self._presence = Presence(idle_s)
        self._clock = clock
        self._wait = wait
        self._lock = threading.Condition()  # of what other threads write: presence, interval, requests, the thread
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._requests = 0
        self._answered = 0
        self._due_at = clock()
        self._latest: Snapshot | None = None
        self._told = PollerStatus("paused", interval_s, "")
        self._reported: set[type[Exception]] = set()
        abandon_in_children(self)

    @property
    def latest(self) -> Snapshot | None:
        """The newest snapshot; None before the first poll."""
        return self._latest

    @property
    def idle_s(self) -> float:
        """Time without input after which pages call themselves idle."""
        return self._presence.idle_s

    def status(self) -> PollerStatus:
        """Whether it polls now, and why."""
        with self._lock:
            now = self._clock()
            why_not = self._presence.why_not(now)
            interval_s = self._interval_s
        if not why_not:
            return PollerStatus("polling", interval_s, "the panel is in sight")
        if self._is_run_live():
            return PollerStatus("polling", interval_s, "a run is live")
        return PollerStatus("paused", interval_s, why_not)

    def tell(self, view: str, state: ViewState | str) -> None:
        """Take over what a view says of itself; one that becomes active gets fresh values at once.

        Args:
            view: The view's id.
            state: See `ViewState`.

        Raises:
            ValueError: There is no such state.
        """
        with self._lock:
            if self._presence.tell(view, ViewState(state), self._clock()):
                self._requests += 1
                self._start()
            self._wake.set()

    def wake(self) -> None:
        """Look again whether polling is wanted: to be called when a run starts."""
        with self._lock:
            self._start()
            self._wake.set()

    def refresh(self, wait_s: float = 0.0) -> Snapshot | None:
        """Sample at once, wanted or not.

        Args:
            wait_s: The longest wait for it.

        Returns:
            The newest snapshot: the one asked for if it came in time.
        """
        with self._lock:
            self._requests += 1
            mine = self._requests
            self._start()
            self._wake.set()
            self._lock.wait_for(lambda: self._answered >= mine or self._is_stopped, wait_s)
            return self._latest

    def set_interval(self, interval_s: float) -> None:
        """Change the time between polls.

        Args:
            interval_s: Seconds, 1 to 600.

        Raises:
            ValueError: It is not within that.
        """
        if not LEAST_INTERVAL_S <= interval_s <= MOST_INTERVAL_S:
            least, most = f"{LEAST_INTERVAL_S:g}", f"{MOST_INTERVAL_S:g}"
            raise ValueError(f"an interval of {interval_s:g} s: it can be {least} to {most} s")
        with self._lock:
            self._due_at += interval_s - self._interval_s
            self._interval_s = interval_s
            self._wake.set()

    def stop(self) -> None:
        """End the thread, within the bound of a sample; can be called twice, and nothing starts it again."""
        with self._lock:
            self._is_stopped = True
            self._wake.set()
            self._lock.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def abandon(self) -> None:
        """In a forked child: the thread is the parent's, and nothing is polled here."""
        self._lock = threading.Condition()  # another thread of the parent may have held them
        self._wake = threading.Event()
        self._is_stopped = True
        self._thread = None

    def _start(self) -> None:
        if self._thread is None and not self._is_stopped:
            thread = threading.Thread(target=self._run, name="air_nb-monitor", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while not self._is_stopped:
            self._wait(self._wake, self._step())
            # Cleared before the state is looked at: whoever sets it has changed the state before.
            self._wake.clear()

    def _step(self) -> float | None:
        """Do what is due; returns for how long there is nothing to do, None for as long as nobody calls."""
        try:
            status = self.status()
            self._tell_status(status)
            is_wanted = status.status == "polling"
            requests = self._requests
            if requests > self._answered or (is_wanted and self._clock() >= self._due_at):
                self._poll(requests)
        except Exception as error:  # noqa: BLE001 - the border: it must go on, and says what happened
            self._report(error)
            return self._interval_s
        return max(0.0, self._due_at - self._clock()) if is_wanted else None

    def _poll(self, requests: int) -> None:
        with self._lock:
            self._due_at = self._clock() + self._interval_s
        try:
            report = self._sampler.sample()
            host = self._host.sample()
            snapshot = Snapshot(report, host, self._holders.of(report), host.at)
            self.history.add(report, host)
            self._latest = snapshot
        finally:
            with self._lock:
                self._answered = requests
                self._lock.notify_all()
        self._call(self._on_sample, snapshot)

    def _tell_status(self, status: PollerStatus) -> None:
        if status != self._told:
            self._told = status
            self._call(self._on_status, status)

    def _call(self, callback: Callable[..., object], value: object) -> None:
        try:
            callback(value)
        except Exception as error:  # noqa: BLE001 - the border: it must go on, and says what happened
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Once of each kind, and in the kernel's log: stderr of this thread would end in whatever cell runs."""
        if type(error) in self._reported:
            return
        self._reported.add(type(error))
        from traitlets.log import get_logger

        get_logger().error("air_nb: the GPU monitor met an error and goes on", exc_info=error)
