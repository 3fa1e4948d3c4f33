"""Actions become output of this process: the only module of ``view`` that touches IPython or the standard streams.

Everything is drawn by the thread that waits for the run, through ``sys.stdout``, ``sys.stderr`` and IPython's display
publisher as they are at that moment, so that capturing them works as for any code of the cell. In a notebook at most
20 batches a second are sent in a flood: past 1,000 messages or 1 MB of stream text a second the Jupyter server
drops everything.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TextIO, assert_never

from air_nb.protocol.events import StreamName
from air_nb.view.actions import Action, Clear, Print, Show, Update

__all__ = ["Drawer", "Front", "detect_front", "pin_thread_to_cell"]

_FLOOD_BATCH_S = 0.05
_BATCH_S = 0.002  # a few lines a second are drawn at once; `session.wait` reads at most 50 times a second in a flood
_FLOOD_CHARS = 8_192


@dataclass(frozen=True, slots=True)
class Front:
    """Where the output goes.

    Attributes:
        kind: ``kernel`` is a Jupyter kernel, ``terminal`` IPython in a terminal, ``script`` plain Python.
        live_bars: Whether displays can be updated in place.
        tty: Whether stdout is a terminal.
        stored: Whether what is shown is kept in a notebook, and so has to be bounded.
    """

    kind: Literal["kernel", "terminal", "script"]
    live_bars: bool
    tty: bool
    stored: bool


def detect_front() -> Front:
    """Look at where the calling code's output goes now.

    Inside ``%%capture`` or ``redirect_stdout`` a kernel is a place for text: what is captured is all of it, in order.
    """
    shell = _shell()
    tty = sys.stdout.isatty() if hasattr(sys.stdout, "isatty") else False
    if shell is None:
        return Front("script", live_bars=False, tty=tty, stored=False)
    if not hasattr(shell, "kernel"):
        return Front("terminal", live_bars=False, tty=tty, stored=False)
    own = type(sys.stdout).__module__.startswith("ipykernel") and hasattr(shell.display_pub, "pub_socket")
    return Front("kernel", live_bars=own, tty=False, stored=own)


class Drawer:
    """Draws actions in the thread that calls it; owns no thread.

    Args:
        front: Where.
        clock: Monotonic seconds.
    """

    def __init__(self, front: Front, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._front = front
        self._clock = clock
        self._waiting: list[Action] = []
        self._next_at = 0.0
        self._last_update: dict[str, Update] = {}
        self._shown_text: dict[str, str] = {}

    def draw(self, actions: Iterable[Action]) -> None:
        """Draw now, or with the next batch if the last one was a moment ago."""
        self.hold(actions)
        if self._waiting and (self._front.kind != "kernel" or self._clock() >= self._next_at):
            self.flush()

    def hold(self, actions: Iterable[Action]) -> None:
        """Draw with the next ``draw``: what came together is sent together."""
        for action in actions:
            self._add(action)

    def timeout(self) -> float | None:
        """Seconds until ``draw(())`` has something to do, None if never."""
        return max(self._next_at - self._clock(), 0.0) if self._waiting else None

    def flush(self) -> None:
        """Draw everything now."""
        waiting, self._waiting = self._waiting, []
        used: set[StreamName] = set()
        for action in waiting:
            match action:
                case Print(stream, text):
                    if used - {stream}:
                        self._flush_streams(used)
                    _stream(stream).write(text)
                    used.add(stream)
                case Show() | Update():
                    self._flush_streams(used)
                    self._publish(action)
                case Clear(wait):
                    self._flush_streams(used)
                    self._clear(wait=wait)
                case _:
                    assert_never(action)
        self._flush_streams(used)
        # Counted from the end: a slow front end then gets fewer batches, not a queue of them.
        chars = sum(len(action.text) for action in waiting if isinstance(action, Print))
        self._next_at = self._clock() + (_FLOOD_BATCH_S if chars > _FLOOD_CHARS else _BATCH_S)

    def close(self) -> None:
        """Draw what is left; where displays can't be updated, print what the last update of each would have shown."""
        self.flush()
        for key, update in self._last_update.items():
            text = _text_of(update)
            if text != self._shown_text.get(key):
                self._publish(Show(update.data, update.metadata, None))
        self._last_update.clear()

    def _add(self, action: Action) -> None:
        if isinstance(action, Clear) and not action.wait:
            self._waiting = [action]
            return
        if isinstance(action, Print | Show) and self._waiting and isinstance(self._waiting[-1], Clear):
            # What an animation clears again before it was drawn need not be drawn.
            del self._waiting[:-1]
        if isinstance(action, Update):
            for index, waiting in enumerate(self._waiting):
                if isinstance(waiting, Show | Update) and waiting.key == action.key:
                    self._waiting[index] = type(waiting)(action.data, action.metadata, action.key)
                    return
        self._waiting.append(action)

    def _publish(self, action: Show | Update) -> None:
        if not self._front.live_bars and self._front.kind != "kernel":
            if isinstance(action, Update):
                self._last_update[action.key] = action
                return
            if action.key is not None:
                self._shown_text[action.key] = _text_of(action)
        if self._front.kind == "script":
            sys.stdout.write(_text_of(action) + "\n")
            sys.stdout.flush()
            return
        from IPython.display import publish_display_data

        extra: dict[str, Any] = {"transient": {"display_id": action.key}} if action.key is not None else {}
        if isinstance(action, Update):
            extra["update"] = True
        publish_display_data(action.data, action.metadata, **extra)

    def _clear(self, *, wait: bool) -> None:
        if self._front.kind == "kernel":
            from IPython.display import clear_output

            clear_output(wait=wait)

    @staticmethod
    def _flush_streams(used: set[StreamName]) -> None:
        for stream in used:
            _stream(stream).flush()
        used.clear()


def pin_thread_to_cell() -> None:
    """Send what this thread prints to the cell that runs now, also after another one has started.

    A thread made by a cell otherwise prints into whichever cell runs. Kernels that can't be asked for it (ipykernel
    before 7.4) keep their own rule.
    """
    shell = _shell()
    if threading.current_thread() is not threading.main_thread() and hasattr(shell, "set_thread_parent"):
        shell.set_thread_parent(shell.get_parent())


def _shell() -> Any:
    """The running IPython shell, or None; IPython is not imported for that."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None


def _stream(name: StreamName) -> TextIO:
    return sys.stdout if name == "stdout" else sys.stderr


def _text_of(action: Show | Update) -> str:
    text = action.data.get("text/plain")
    return text if isinstance(text, str) else f"<display of {', '.join(sorted(action.data))}>"
