"""Fetches something slow again and again on a thread of its own, as long as somebody wants it."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Refresher"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_JOIN_S = 2.0


class Refresher(Generic[_T]):
    """One fetch at a time. The thread begins with the first `wake` and ends when `period_s` says that nobody looks.

    Args:
        name: What is fetched; the thread's name.
        fetch: Reads the files; may be slow.
        use: Gets what was fetched.
        fail: Gets the problem, one line.
        period_s: Seconds to the next fetch unless somebody wakes it; None: nobody looks.
    """

    def __init__(
        self,
        name: str,
        fetch: Callable[[], _T],
        use: Callable[[_T], None],
        fail: Callable[[str], None],
        period_s: Callable[[], float | None],
    ) -> None:
        self._name = name
        self._fetch = fetch
        self._use = use
        self._fail = fail
        self._period_s = period_s
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_wanted = False
        self._is_closed = False

    def wake(self) -> None:
        """Fetch now, in the thread; returns at once."""
        with self._condition:
            if self._is_closed:
                return
            self._is_wanted = True
            self._condition.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=f"air_nb-panel-{self._name}", daemon=True)
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """End the thread. One that a disk holds is left behind after two seconds; it is a daemon."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def abandon(self) -> None:
        """In a forked child: the thread is the parent's."""
        self._condition = threading.Condition()  # another thread of the parent may have held it
        self._is_closed = True
        self._thread = None

    def _run(self) -> None:
        while self._has_next():
            try:
                self._use(self._fetch())
            except Exception as error:  # noqa: BLE001 - the border: whatever it is, it is shown, and the next may succeed
                _log.debug("the panel's %s could not be read", self._name, exc_info=True)
                self._fail(f"{type(error).__name__}: {error}"[:500])

    def _has_next(self) -> bool:
        """Wait for the time of the next fetch; False: the thread ends."""
        period_s = self._period_s()
        with self._condition:
            is_idle = period_s is None
            if not self._is_wanted and not self._is_closed and not is_idle:
                self._condition.wait(period_s)
            if self._is_closed or (is_idle and not self._is_wanted):
                self._thread = None  # under the lock: the next wake starts another
                return False
            self._is_wanted = False
            return True
