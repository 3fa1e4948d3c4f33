"""The log view of ``--output tabs``: one section per rank, in one display.

Pure. While the run lasts, the last lines of every rank are seen side by side; at the end the same display becomes one
``<details>`` per rank. There are no tabs to click while it lasts, because every update of a display resets what was
chosen in it, and no widget, because a widget is dead after a reload of the page and in a saved notebook.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from air_nb.view.actions import Action, Print, Show, Update
from air_nb.view.markup import TEXT_STYLE, as_html

__all__ = ["Tabs"]

TAIL_LINES = 500
_TAIL_CHARS = 1 << 16
_LIVE_LINES = 10
_WIDTH = 400
_UPDATE_S = 0.2


class _Log:
    """Bounded tail of one rank."""

    def __init__(self) -> None:
        self.tail: deque[str] = deque()
        self.chars = 0
        self.lines = 0
        self.ended = False

    def add(self, lines: Sequence[str]) -> None:
        self.lines += len(lines)
        for line in lines[-TAIL_LINES:]:
            self.tail.append(line)
            self.chars += len(line) + 1
        while len(self.tail) > TAIL_LINES or (self.chars > _TAIL_CHARS and len(self.tail) > 1):
            self.chars -= len(self.tail.popleft()) + 1


class Tabs:
    """Sections of all ranks.

    Args:
        ranks: How many.
        live: Whether the display can be updated in place; if not, the sections are printed at the end.
        key: Display id.
        live_lines: Gives the unfinished lines of a rank.
    """

    def __init__(self, ranks: int, *, live: bool, key: str, live_lines: Callable[[int], Sequence[str]]) -> None:
        self._logs = [_Log() for _ in range(ranks)]
        self._live = live
        self._key = key
        self._live_lines = live_lines
        self._shown = False
        self._dirty = False
        self._next_at = 0.0

    def add(self, rank: int, lines: Sequence[str]) -> None:
        """Append finished lines of a rank."""
        self._logs[rank].add(lines)
        self._dirty = True

    def skip(self, rank: int, lines: int) -> None:
        """Count lines that are too old to be seen."""
        self._logs[rank].lines += lines
        self._dirty = True

    def touch(self) -> None:
        """Unfinished lines have changed."""
        self._dirty = True

    def empty(self, rank: int) -> None:
        """The rank cleared its output."""
        log = self._logs[rank]
        log.tail.clear()
        log.chars = 0
        self._dirty = True

    def end(self, rank: int) -> None:
        """The rank is done."""
        self._logs[rank].ended = True
        self._dirty = True

    def take(self, now: float) -> list[Action]:
        """The display, if it has changed and is not updated too often."""
        if not (self._live and self._dirty and now >= self._next_at):
            return []
        self._dirty = False
        self._next_at = now + _UPDATE_S
        return [self._put(self._text(_LIVE_LINES), self._panes())]

    def deadline(self) -> float | None:
        """When ``take`` has something to draw that it could not draw yet."""
        return self._next_at if self._live and self._dirty else None

    def finish(self) -> list[Action]:
        """The final form, which needs no kernel."""
        if not any(log.lines for log in self._logs) and not self._shown:
            return []
        if not self._live:
            return [Print("stdout", self._text(TAIL_LINES) + "\n")]
        return [self._put(self._text(TAIL_LINES), self._details())]

    def _put(self, text: str, markup: str) -> Action:
        data = {"text/plain": text, "text/html": markup}
        action: Action = Update(data, {}, self._key) if self._shown else Show(data, {}, self._key)
        self._shown = True
        return action

    def _last(self, rank: int, count: int) -> list[str]:
        lines = [*self._logs[rank].tail, *self._live_lines(rank)]
        return [line if len(line) <= _WIDTH else line[:_WIDTH] + "…" for line in lines[-count:]]

    def _title(self, rank: int) -> str:
        log = self._logs[rank]
        count = "1 line" if log.lines == 1 else f"{log.lines:,} lines"
        hidden = f", the last {len(log.tail):,}" if len(log.tail) < log.lines else ""
        return f"rank {rank}: {count}{hidden}{', ended' if log.ended else ''}"

    def _text(self, count: int) -> str:
        return "\n".join(
            "\n".join([f"── {self._title(rank)} ──", *self._last(rank, count)]) for rank in range(len(self._logs))
        )

    def _panes(self) -> str:
        panes = "".join(
            '<div style="border:1px solid var(--jp-border-color2,#ccc);padding:2px 6px;min-width:0">'
            f'<div style="opacity:.7;font-size:90%">{self._title(rank)}</div>'
            f'<pre style="margin:0;height:{_LIVE_LINES}lh;overflow:hidden;white-space:pre">'
            f"{as_html(chr(10).join(self._last(rank, _LIVE_LINES)))}</pre></div>"
            for rank in range(len(self._logs))
        )
        columns = "repeat(auto-fit,minmax(min(28em,100%),1fr))"
        return f'<div style="{TEXT_STYLE};display:grid;gap:4px;grid-template-columns:{columns}">{panes}</div>'

    def _details(self) -> str:
        logs = "".join(
            f"<details{' open' if rank == 0 else ''}><summary>{self._title(rank)}</summary>"
            '<pre style="max-height:30em;overflow:auto">'
            f"{as_html(chr(10).join(self._last(rank, TAIL_LINES)))}</pre></details>"
            for rank in range(len(self._logs))
        )
        return f'<div style="{TEXT_STYLE}">{logs}</div>'
