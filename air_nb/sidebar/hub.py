"""Serves the panel's pages: greets them, pushes what has changed, hands on what they ask for.

In the kernel. `connect`, `greet` and `receive` run on whatever thread the kernel handles the page's message on, a
subshell's as a rule, and never wait for a disk, a driver or a run: rows come from two threads of the hub (``runs``,
``checkpoints``), which live as long as somebody looks, and slow requests get a thread each. Samples are pushed on the
monitor's thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from air_nb.monitor.presence import ViewState
from air_nb.runs.forked import abandon_in_children
from air_nb.sidebar import messages
from air_nb.sidebar.errands import Errands, answer
from air_nb.sidebar.pages import Pages
from air_nb.sidebar.refresher import Refresher
from air_nb.sidebar.requests import (
    Log,
    Present,
    Refresh,
    Request,
    Resume,
    Resync,
    SetInterval,
    Stop,
    Verify,
    parse_request,
    request_number,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from air_nb.monitor.poller import Poller, PollerStatus, Snapshot
    from air_nb.sidebar.actions import Actions
    from air_nb.sidebar.connection import Connection
    from air_nb.sidebar.messages import Facts, Message
    from air_nb.sidebar.rows import RootRows, RunRow

__all__ = ["Hub"]

_LIVE_PERIOD_S = 1.0  # of a live run's state and last line; its time is counted by the page


class Hub:
    """See the module.

    Args:
        actions: What is shown besides samples, and what a page may ask for.
        facts: Which kernel this is.
        is_run_live: Whether a run of this kernel is live, or about to be.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        actions: Actions,
        facts: Facts,
        *,
        is_run_live: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actions = actions
        self._facts = facts
        self._is_run_live = is_run_live
        self._poller: Poller | None = None
        self._pages = Pages(lambda: self._monitor.idle_s, clock)
        self._errands = Errands(self._do, self._refresh_rows)
        self._run_rows: list[RunRow] = []
        self._root_rows: list[RootRows] = []
        self._rows: dict[str, Message] = {}  # the last messages of those
        self._runs = Refresher("runs", actions.runs, self._on_runs, self._on_runs_problem, self._runs_period_s)
        self._roots = Refresher(
            "checkpoints", actions.checkpoints, self._on_roots, self._on_roots_problem, self._roots_period_s
        )
        abandon_in_children(self)

    def attach(self, poller: Poller) -> None:
        """Give it the monitor, whose callbacks are `on_sample` and `on_status`; before the first page."""
        self._poller = poller

    @property
    def _monitor(self) -> Poller:
        assert self._poller is not None, "attached before the first page"
        return self._poller

    # ------------------------------------------------------------------------------------------------ pages come and go

    def connect(
        self,
        transmit: Callable[[Message], None],
        hang_up: Callable[[], None],
        is_reachable: Callable[[], bool] = lambda: True,
        forget: Callable[[], None] = lambda: None,
    ) -> Connection:
        """A page is there; `greet` it when it can hear.

        Args:
            transmit: Sends a JSON object to it, from any thread.
            hang_up: Tells it that this is over.
            is_reachable: False when it has gone without a word.
            forget: Called then.
        """
        connection, surplus = self._pages.add(transmit, hang_up, is_reachable, forget)
        for each in surplus:
            self._end(each)
        return connection

    def greet(self, connection: Connection) -> None:
        """Say everything that is known now; rows that have to be read follow."""
        connection.greet(self._everything())
        self._refresh_rows()

    def disconnect(self, connection: Connection) -> None:
        """The page has hung up."""
        connection.end()
        self._forget(connection)

    def is_in_sight(self) -> bool:
        """Whether a page has the panel on the screen."""
        return self._pages.has_view(ViewState.ACTIVE, ViewState.IDLE)

    def close(self) -> None:
        """Hang up on all pages and end the threads. A slow request that is under way is left to its end."""
        for connection in self._pages.close():
            self._end(connection)
        self._actions.close()
        self._runs.close()
        self._roots.close()

    def abandon(self) -> None:
        """In a forked child: pages and threads are the parent's."""
        self._pages.abandon()
        self._errands.abandon()
        self._runs.abandon()
        self._roots.abandon()

    def _end(self, connection: Connection) -> None:
        connection.close()
        self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self._pages.remove(connection)
        for view in tuple(connection.views):
            self._monitor.tell(view, ViewState.GONE)

    def _everything(self) -> Iterator[Message]:
        poller = self._monitor
        ring, latest, status = poller.history, poller.latest, poller.status()
        yield messages.hello(
            self._facts,
            interval_s=status.interval_s,
            idle_s=poller.idle_s,
            window_s=ring.window_s,
            points=ring.points,
        )
        if latest is not None:
            yield messages.devices(latest.report, latest.host)
        yield messages.history(ring.as_base64())
        if latest is not None:
            yield messages.sample(latest)
            yield messages.processes(latest.report, latest.holders)
        yield from tuple(self._rows.values())
        yield messages.status(status)

    # ---------------------------------------------------------------------------------------------------------- pushes

    def on_sample(self, snapshot: Snapshot) -> None:
        """Push what the monitor has seen (its thread); forget pages that have gone, whose views it still counts."""
        for connection in self._pages.lost():
            connection.lose()
            self._forget(connection)
        for connection in self._pages.awake():
            connection.update(messages.devices(snapshot.report, snapshot.host))
            connection.send(messages.sample(snapshot))
            connection.update(messages.processes(snapshot.report, snapshot.holders))

    def on_status(self, status: PollerStatus) -> None:
        """Push whether the monitor polls (its thread)."""
        self._push(messages.status(status))

    def runs_changed(self) -> None:
        """A run of this kernel has started or ended: look at once, also for what it has saved."""
        if self._is_watched():
            self._refresh_rows()

    def _push(self, message: Message) -> None:
        for connection in self._pages.awake():
            connection.update(message)

    def _is_watched(self) -> bool:
        return self._pages.has_view(ViewState.ACTIVE)

    def _refresh_rows(self) -> None:
        self._runs.wake()
        self._roots.wake()

    def _on_runs(self, rows: list[RunRow], problem: str = "") -> None:
        self._run_rows = rows
        self._push_rows(messages.runs(rows, problem))

    def _on_runs_problem(self, problem: str) -> None:
        self._on_runs(self._run_rows, problem)

    def _on_roots(self, rows: list[RootRows], problem: str = "") -> None:
        self._root_rows = rows
        self._push_rows(messages.checkpoints(rows, problem))

    def _on_roots_problem(self, problem: str) -> None:
        self._on_roots(self._root_rows, problem)

    def _push_rows(self, message: Message) -> None:
        self._rows[message["type"]] = message
        self._push(message)

    def _runs_period_s(self) -> float | None:
        period_s = self._roots_period_s()
        is_live = self._is_run_live() or any(row.is_live for row in self._run_rows)
        return _LIVE_PERIOD_S if is_live and period_s is not None else period_s

    def _roots_period_s(self) -> float | None:
        return self._monitor.status().interval_s if self._is_watched() else None

    # -------------------------------------------------------------------------------------------------------- requests

    def receive(self, connection: Connection, data: object) -> None:
        """Handle a message of a page. What can't be one is answered, or ignored if no answer is wanted."""
        number = request_number(data)
        if not connection.is_open and not self._pages.take_back(connection):
            return
        self._pages.heard(connection)
        try:
            request = parse_request(data)
        except ValueError as error:
            answer(connection, number, ok=False, text=str(error))
            return
        if connection.is_asleep and not isinstance(request, Resync) and not _is_farewell(request):
            self.greet(connection)
        self._errands.run(connection, number, request)

    def _do(self, connection: Connection, request: Request) -> str:  # noqa: PLR0911 - one for each kind
        match request:
            case Present():
                return self._see(connection, request)
            case Refresh():
                self._monitor.refresh()
                self._refresh_rows()
                return ""
            case SetInterval():
                self._monitor.set_interval(request.seconds)
                self._refresh_rows()
                self._push(messages.status(self._monitor.status()))
                return ""
            case Resync():
                self.greet(connection)
                return ""
            case Log():
                connection.send(messages.log(self._actions.log(request.run_id, request.rank, request.offset)))
                return ""
            case Stop():
                return self._actions.stop(request.run_id)
            case Resume():
                return self._actions.resume(request.run_id, request.path)
            case Verify():
                return self._actions.verify(request.path)

    def _see(self, connection: Connection, request: Present) -> str:
        was_watched = self._is_watched()
        is_gone = request.state is ViewState.GONE
        connection.see(request.view, request.state, is_gone=is_gone)
        self._monitor.tell(request.view, request.state)
        if is_gone and not connection.views:
            connection.sleep()
        if not was_watched and self._is_watched():
            self._refresh_rows()
        return ""


def _is_farewell(request: Request) -> bool:
    return isinstance(request, Present) and request.state is not ViewState.ACTIVE
