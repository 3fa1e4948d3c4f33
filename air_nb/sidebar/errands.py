"""Carries out what pages ask for, and answers: quick things on the caller's thread, slow ones on a thread each."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from air_nb.errors import AirNbError
from air_nb.sidebar import messages
from air_nb.sidebar.requests import Log, Request, Resume, Stop, Verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from air_nb.sidebar.connection import Connection

__all__ = ["Errands", "answer"]

_MOST = 8
_BUSY = "too much is under way; try again in a moment"


class Errands:
    """See the module.

    Args:
        do: Carries out a request of a page; returns what to say.
        done: Called after each slow one.
    """

    def __init__(self, do: Callable[[Connection, Request], str], done: Callable[[], None]) -> None:
        self._do = do
        self._done = done
        self._lock = threading.Lock()
        self._under_way = {True: 0, False: 0}  # reading a log, and the rest: a disk that hangs must not keep off Stop

    def run(self, connection: Connection, number: int | None, request: Request) -> None:
        """Carry it out, now or in the background.

        Args:
            connection: Who asks.
            number: What the answer repeats; None: no answer is wanted.
            request: What is asked for.
        """
        if not isinstance(request, Log | Stop | Resume | Verify):
            self._carry_out(connection, number, request)
        elif self._has_room(isinstance(request, Log)):
            name = f"air_nb-panel-{type(request).__name__.lower()}"
            arguments = (connection, number, request)
            threading.Thread(target=self._carry_out_slowly, args=arguments, name=name, daemon=True).start()
        else:
            answer(connection, number, ok=False, text=_BUSY)

    def abandon(self) -> None:
        """In a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def _has_room(self, is_log: bool) -> bool:  # noqa: FBT001 - a key
        with self._lock:
            has_room = self._under_way[is_log] < _MOST
            self._under_way[is_log] += has_room
            return has_room

    def _carry_out_slowly(self, connection: Connection, number: int | None, request: Request) -> None:
        is_log = isinstance(request, Log)
        try:
            self._carry_out(connection, number, request)
            if not is_log:
                self._done()
        finally:
            with self._lock:
                self._under_way[is_log] -= 1

    def _carry_out(self, connection: Connection, number: int | None, request: Request) -> None:
        try:
            text = self._do(connection, request)
        except LookupError as error:
            answer(connection, number, ok=False, text=str(error.args[0]) if error.args else "not found")
        except (AirNbError, OSError, ValueError) as error:
            answer(connection, number, ok=False, text=str(error))
        except Exception as error:  # noqa: BLE001 - the border to the page: a button must not end in silence
            _report(error)
            answer(connection, number, ok=False, text=f"{type(error).__name__}: {error}")
        else:
            answer(connection, number, ok=True, text=text)


def answer(connection: Connection, number: int | None, *, ok: bool, text: str) -> None:
    """Answer a request, if an answer is wanted."""
    if number is not None:
        connection.send(messages.reply(number, ok=ok, text=text))


def _report(error: Exception) -> None:
    """In the kernel's log: stderr would end in whatever cell runs."""
    from traitlets.log import get_logger

    get_logger().error("air_nb: the panel met an error and goes on", exc_info=error)
