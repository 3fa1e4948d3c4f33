"""One page's connection: numbers its messages, sends what has changed, says everything again after a loss.

Any thread may send; what one connection sends is numbered and leaves under one lock, so that the numbers rise on the
wire too.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from air_nb.monitor.presence import ViewState
    from air_nb.sidebar.messages import Message

__all__ = ["Connection"]

_log = logging.getLogger(__name__)
_MOST_VIEWS = 16  # of one page: the sidebar's, and one for each time that its widget is shown


class Connection:
    """See the module.

    Args:
        transmit: Sends a JSON object to the page; called under the connection's lock.
        hang_up: Tells the page that it is over.
        is_reachable: False when the page has gone without a word.
        forget: Called when it has; nothing of it is needed any more.
        now: Time of the hub's clock.
    """

    def __init__(
        self,
        transmit: Callable[[Message], None],
        hang_up: Callable[[], None],
        is_reachable: Callable[[], bool],
        forget: Callable[[], None],
        now: float,
    ) -> None:
        self._transmit = transmit
        self._hang_up = hang_up
        self._is_reachable = is_reachable
        self._forget = forget
        self._has_ended = False
        self._lock = threading.RLock()
        self._seq = 0
        self._last: dict[str, Message] = {}
        self._is_open = True
        self.heard_at = now
        self.is_asleep = False
        self.views: dict[str, ViewState] = {}

    @property
    def is_open(self) -> bool:
        """False from the moment that a message could not be sent, or that either side has hung up or gone."""
        return self._is_open and self._is_reachable()

    def greet(self, messages: Iterable[Message]) -> None:
        """Send everything; the numbers begin again with the first."""
        with self._lock:
            self._seq = 0
            self._last.clear()
            self.is_asleep = False
            for message in messages:
                self.update(message)

    def update(self, message: Message) -> None:
        """Send a message about a state, unless the page has it already."""
        with self._lock:
            kind = message["type"]
            if self.is_asleep or self._last.get(kind) == message:
                return
            self._last[kind] = message
            self.send(message)

    def send(self, message: Message) -> None:
        """Send a message."""
        with self._lock:
            if not self._is_open or self.is_asleep:
                return
            number, self._seq = self._seq, self._seq + 1
            try:
                self._transmit({**message, "seq": number})
            except Exception:  # noqa: BLE001 - whatever the transport makes of a page or a kernel that goes away
                self._is_open = False
                _log.debug("a page of the panel can't be reached", exc_info=True)

    def sleep(self) -> None:
        """Send nothing until the page is heard again, which is then told everything."""
        with self._lock:
            self.is_asleep = True
            self._last.clear()

    def see(self, view: str, state: ViewState, *, is_gone: bool) -> None:
        """Remember what a view says of itself."""
        self.views.pop(view, None)
        if not is_gone:
            self.views[view] = state
        while len(self.views) > _MOST_VIEWS:
            del self.views[next(iter(self.views))]

    def lose(self) -> None:
        """It can't be reached now."""
        self._is_open = False
        self._last.clear()
        if not self._is_reachable():
            self._has_ended = True
            self._forget()

    def end(self) -> None:
        """The page has hung up."""
        self._has_ended = True
        self.lose()

    def reopen(self) -> bool:
        """The page is heard although it could not be sent to; False if one of us has hung up."""
        if not self._has_ended:
            self._is_open = self.is_asleep = True
        return not self._has_ended

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._has_ended = True
            if not self._is_open:
                return
            self._is_open = False
            try:
                self._hang_up()
            except Exception:  # noqa: BLE001 - the same
                _log.debug("a page of the panel can't be told that it is over", exc_info=True)
