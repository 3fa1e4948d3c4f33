"""The pages that are connected: how many may be, which of them are awake, whether anybody looks. Any thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from air_nb.sidebar.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from air_nb.monitor.presence import ViewState
    from air_nb.sidebar.messages import Message

__all__ = ["Pages"]

_MOST = 32
_LEAST_SILENCE_S = 30.0


class Pages:
    """See the module.

    Args:
        idle_s: A page that is silent for so long, and 30 s at least, has gone without a word, or its browser sleeps.
        clock: Monotonic seconds.
    """

    def __init__(self, idle_s: Callable[[], float], clock: Callable[[], float]) -> None:
        self._idle_s = idle_s
        self._clock = clock
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._is_closed = False

    def add(
        self,
        transmit: Callable[[Message], None],
        hang_up: Callable[[], None],
        is_reachable: Callable[[], bool],
        forget: Callable[[], None],
    ) -> tuple[Connection, list[Connection]]:
        """Take a page in.

        Returns:
            Its connection, and those to be closed for it: the ones that have been silent for longest.
        """
        connection = Connection(transmit, hang_up, is_reachable, forget, self._clock())
        with self._lock:
            if self._is_closed:
                return connection, [connection]
            self._connections.append(connection)
            surplus = len(self._connections) - _MOST
            oldest = sorted(self._connections, key=lambda each: each.heard_at)
            return connection, oldest[: max(0, surplus)]

    def take_back(self, connection: Connection) -> bool:
        """A page that could not be reached is heard again; False if it has no place here any more."""
        with self._lock:
            if self._is_closed or not connection.reopen():
                return False
            if connection not in self._connections:
                self._connections.append(connection)
            return True

    def remove(self, connection: Connection) -> None:
        """Forget a page."""
        with self._lock:
            self._connections = [each for each in self._connections if each is not connection]

    def lost(self) -> list[Connection]:
        """Those that can't be reached any more."""
        with self._lock:
            return [each for each in self._connections if not each.is_open]

    def close(self) -> list[Connection]:
        """Take in no others; returns those that are to be closed."""
        with self._lock:
            self._is_closed = True
            return self._connections.copy()

    def abandon(self) -> None:
        """In a forked child: they are the parent's."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._is_closed = True
        for connection in self._connections:
            connection.lose()
        self._connections = []

    def heard(self, connection: Connection) -> None:
        """A message of the page has come."""
        connection.heard_at = self._clock()

    def awake(self) -> list[Connection]:
        """Those to send to. Pages that have fallen silent get nothing until they are heard again."""
        with self._lock:
            connections = [each for each in self._connections if each.is_open and not each.is_asleep]
        deadline = self._clock() - max(_LEAST_SILENCE_S, self._idle_s())
        for connection in connections:
            if connection.heard_at <= deadline:
                connection.sleep()
        return [each for each in connections if not each.is_asleep]

    def has_view(self, *states: ViewState) -> bool:
        """Whether any view is in one of these states."""
        return any(state in states for each in self.awake() for state in tuple(each.views.values()))
