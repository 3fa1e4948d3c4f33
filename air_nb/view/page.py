"""The text of a cell: head as stream output, then one display block with the tail and the live bars.

Pure. What a cell stores is bounded: half of ``max_lines`` as head, half as tail, and a line in between that says how
many are only in the files. Text is stream output until the first bar or until the head is full. From then it goes to
a block, a display that is updated in place. A block is left where it is (and a new one is opened when needed) when
something else must come below it, or when it is full and the head is not.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from air_nb.protocol.events import StreamName
from air_nb.view.actions import Action, Clear, Print, Show, Update
from air_nb.view.fold import label

__all__ = ["Page", "skipped_line"]

HEAD_CHARS = 1 << 19
"""Stream text of one cell: half of what the Jupyter server lets through in a second before it drops everything."""

BLOCK_CHARS = 48 << 10
LIVE_CHARS = 12 << 10
_TAIL_CHARS_STREAM = 1 << 18
_TAIL_MIN = 20
_UPDATE_S = 0.1
_CHARS_PER_S = 200_000


class _Kept(NamedTuple):
    text: str
    stream: StreamName
    ranks: tuple[int, ...]


def skipped_line(skipped: Counter[tuple[tuple[int, ...], StreamName]], directory: str = "") -> str:
    """``… 48,211 lines in rank_3.out``; ranks with equal counts together, the sum if there are many counts.

    Args:
        skipped: Lines by the ranks that printed them (folded ones once) and their stream.
        directory: Of the files.
    """
    counts: Counter[tuple[int, StreamName]] = Counter()
    for (ranks, stream), count in skipped.items():
        for rank in ranks:
            counts[rank, stream] += count
    parts: dict[tuple[int, StreamName], tuple[int, ...]] = {}
    for (rank, stream), count in sorted(counts.items()):
        parts[count, stream] = (*parts.get((count, stream), ()), rank)
    where = f"{directory.rstrip('/')}/" if directory else ""
    if len(parts) > 3:  # noqa: PLR2004 - a line of more parts is not read
        ranks = tuple(sorted({rank for rank, _ in counts}))
        return f"… {counts.total():,} lines in {where}rank_{label(ranks)}.*"
    texts = []
    for (count, stream), ranks in parts.items():
        who, each = (str(ranks[0]), "") if len(ranks) == 1 else (label(ranks), "each of ")
        texts.append(f"{count:,} lines in {each}{where}rank_{who}.{'out' if stream == 'stdout' else 'err'}")
        where = ""
    return "… " + ", ".join(texts)


class Page:
    """Collects what a cell shows and turns it into actions.

    Args:
        live: Whether displays can be updated in place; if not, all is stream text and the tail comes at the end.
        max_lines: Lines that the cell may store, None for a place that stores none (a terminal).
        name: Prefix of the display ids.
        directory: Of the log files, named in the line about skipped ones; empty to leave it out.
        live_lines: Gives the bars and other unfinished lines to draw now.
    """

    def __init__(
        self, *, live: bool, max_lines: int | None, name: str, directory: str, live_lines: Callable[[], Sequence[str]]
    ) -> None:
        self._live = live
        self._max_lines = max_lines
        self._name = name
        self._directory = directory
        self._live_lines = live_lines
        self._actions: list[Action] = []
        self._text: list[str] = []
        self._stream: StreamName = "stdout"
        self._line_open = False
        self._head_lines = 0
        self._head_chars = 0
        self._stored = 0
        self._skipped: Counter[tuple[tuple[int, ...], StreamName]] = Counter()
        self._tail: deque[_Kept] = deque()
        self._tail_chars = 0
        self._block_key: str | None = None
        self._blocks = 0
        self._dirty = False
        self._next_at = 0.0
        self._counted = 0
        self._headlines: dict[str, dict[str, Any]] = {}
        self._lost_headlines: dict[str, dict[str, Any]] = {}

    @property
    def is_full(self) -> bool:
        """Whether the head is full, so that lines now go to the tail."""
        return self._max_lines is not None and (
            self._head_lines >= self._max_lines // 2 or self._head_chars >= HEAD_CHARS
        )

    @property
    def tail_lines(self) -> int:
        """How many lines the tail can hold: more than that need not be made."""
        return max((self._max_lines or 0) - self._stored - self._head_lines, _TAIL_MIN)

    @property
    def tail_chars(self) -> int:
        """How many characters the tail can hold."""
        return BLOCK_CHARS if self._live else _TAIL_CHARS_STREAM

    def raw(self, stream: StreamName, text: str) -> bool:
        """Write stream text as it is; False if it has to come as lines because of the caps or an open block."""
        lines = text.count("\n")
        if self._max_lines is not None and (
            self._head_lines + lines > self._max_lines // 2 or self._head_chars + len(text) > HEAD_CHARS
        ):
            return False
        if self._block_key is not None or self._tail:
            return False
        self._write(stream, text)
        self._head_lines += lines
        self._head_chars += len(text)
        self._line_open = not text.endswith("\n")
        return True

    def line(self, text: str, stream: StreamName, ranks: tuple[int, ...]) -> None:
        """Add a finished line, prefix included."""
        full = self.is_full
        if not (full or self._block_key is not None or self._tail):
            self._write(stream, text + "\n")
            self._line_open = False
            self._head_lines += 1
            self._head_chars += len(text) + 1
            return
        self._tail.append(_Kept(text, stream, ranks))
        self._tail_chars += len(text) + 1
        self._dirty = True
        if full:
            # In a flood the tail is cut now and then, not for every line.
            if self._tail_chars > 2 * self.tail_chars or len(self._tail) > 2 * self.tail_lines:
                self._evict()
            return
        self._head_lines += 1
        self._head_chars += len(text) + 1
        self._counted += 1
        if self._tail_chars > BLOCK_CHARS or self.is_full:
            self._leave_block()

    def skip(self, rank: int, stream: StreamName, lines: int) -> None:
        """Count lines that are not even looked at: too many came at once."""
        if lines:
            self._skipped[(rank,), stream] += lines
            self._dirty = True

    def touch(self) -> None:
        """The live lines have changed."""
        self._dirty = self._dirty or self._live

    def show(self, data: dict[str, Any], metadata: dict[str, Any], key: str | None) -> None:
        """Add a display below everything so far."""
        self._leave_block()
        self._act(Show(data, metadata, key))

    def update(self, data: dict[str, Any], metadata: dict[str, Any], key: str) -> None:
        """Change a display."""
        self._act(Update(data, metadata, key))

    def clear(self, *, wait: bool) -> None:
        """Empty the cell, our own lines included; the header comes back with the next output."""
        self._leave_block()
        self._act(Clear(wait))
        self._head_lines = self._head_chars = self._stored = 0
        self._line_open = False
        self._lost_headlines = dict(self._headlines) if self._live else {}

    def headline(self, data: dict[str, Any], key: str) -> None:
        """Show one of the lines of ours around the output, or change it (places without displays keep the first)."""
        known = key in self._headlines
        self._headlines[key] = data
        if not self._live:
            if not known:
                self._write("stdout", ("\n" if self._line_open else "") + data["text/plain"] + "\n")
                self._line_open = False
        elif known:
            self._act(Update(data, {}, key))
        else:
            self.show(data, {}, key)

    def take(self, now: float) -> list[Action]:
        """Everything to draw now."""
        if self._dirty and self._live and now >= self._next_at:
            self._render(now)
        self._flush()
        actions, self._actions = self._actions, []
        return actions

    def deadline(self) -> float | None:
        """When ``take`` has something to draw that it could not draw yet."""
        return self._next_at if self._dirty and self._live else None

    def finish(self) -> None:
        """Write the tail or leave the block in its last state; there are no live lines any more."""
        self._leave_block()

    def _write(self, stream: StreamName, text: str) -> None:
        self._restore_headlines()
        if self._text and stream != self._stream:
            self._flush()
        self._stream = stream
        self._text.append(text)

    def _flush(self) -> None:
        if self._text:
            self._actions.append(Print(self._stream, "".join(self._text)))
            self._text = []

    def _act(self, action: Action) -> None:
        self._flush()
        if isinstance(action, Show):
            self._restore_headlines()
        self._actions.append(action)

    def _restore_headlines(self) -> None:
        lost, self._lost_headlines = self._lost_headlines, {}
        self._actions.extend(Show(data, {}, key) for key, data in lost.items())

    def _evict(self) -> None:
        most, chars = self.tail_lines, self.tail_chars
        tail, size, skipped = self._tail, self._tail_chars, self._skipped
        while len(tail) > most or (size > chars and len(tail) > 1):
            text, stream, ranks = tail.popleft()
            size -= len(text) + 1
            skipped[ranks, stream] += 1
        self._tail_chars = size

    def _lines(self) -> list[str]:
        if self.is_full:
            self._evict()
        marker = [skipped_line(self._skipped, self._directory)] if self._skipped else []
        return [*marker, *(kept.text for kept in self._tail)]

    def _render(self, now: float) -> None:
        self._dirty = False
        live = _fit(self._live_lines())
        lines = self._lines()
        if not (live or lines or self._block_key):
            return
        text = "\n".join([*lines, *live])
        self._put_block(text)
        self._next_at = now + max(_UPDATE_S, len(text) / _CHARS_PER_S)

    def _put_block(self, text: str) -> None:
        data = {"text/plain": text}
        if self._block_key is None:
            self._blocks += 1
            self._block_key = f"{self._name}-text-{self._blocks}"
            self._act(Show(data, {}, self._block_key))
        else:
            self._act(Update(data, {}, self._block_key))

    def _leave_block(self) -> None:
        """What follows comes below: nothing more is changed in the block, live lines go on in the next one."""
        if self._live:
            lines = self._lines()
            if lines or self._block_key:
                self._put_block("\n".join(lines))
            self._block_key = None
            self._dirty = True
        else:
            if self.is_full:
                self._evict()
            if self._skipped:
                self._write("stdout", skipped_line(self._skipped, self._directory) + "\n")
            for text, stream, _ in self._tail:
                self._write(stream, text + "\n")
        self._stored += len(self._tail) - self._counted
        self._counted = 0
        self._tail.clear()
        self._tail_chars = 0
        self._skipped.clear()


def _fit(lines: Sequence[str]) -> list[str]:
    """As many of the live lines as there is room for."""
    fitting: list[str] = []
    room = LIVE_CHARS
    for line in lines:
        text = line[:500]
        room -= len(text) + 1
        if room < 0:
            fitting.append(f"… {len(lines) - len(fitting)} more")
            break
        fitting.append(text)
    return fitting
