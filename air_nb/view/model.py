r"""What the ranks made becomes what the cell shows: a reducer over ``RankEvent``.

Pure: no clock, no IPython, no files. Events go in with the time at which they were read, actions come out.

::

    Text  -> LineBuffer (per rank and stream) --+-> Folder (merged) -+-> Page -> Print, Show, Update
    Rich  -> Displays                         --+-> directly         +-> Tabs

* merged: equal lines at the heads of the ranks' queues become one, ``[0-7] epoch 1``.
* all: every line at once, with its rank. rank0, or a single rank: no prefix, text as it comes.
* A line that was rewritten after ``\r`` is a bar: drawn live where displays can be updated, else only its last state.
* An unfinished line is shown after a while, except in quiet runs, where nothing may depend on time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, assert_never

from air_nb.protocol.events import RankBegan, RankEnded, RankEvent, Rich, StreamName, Text
from air_nb.tracking.links import Link
from air_nb.view.actions import Action
from air_nb.view.fold import Folder, Item, Released, label
from air_nb.view.markup import headline
from air_nb.view.page import Page
from air_nb.view.rich import Displays, digest, plain_text, without_widget
from air_nb.view.screen import LineBuffer
from air_nb.view.tabs import TAIL_LINES, Tabs

__all__ = ["CellModel", "OutputMode"]

OutputMode = Literal["merged", "rank0", "all", "tabs", "none"]

FOLD_S = 0.15
START_S = 1.0
LOOK_S = 0.01
QUIET_S = 30.0
SETTLE_S = 0.15
PARTIAL_S = 0.5
_QUEUED, _QUEUED_CHARS = 1_000, 1 << 20
_QUIET_QUEUED, _QUIET_QUEUED_CHARS = 50_000, 1 << 24
_WIDGET_NOTE = "note: a widget made on a rank is shown as its text; only the kernel's own widgets are live"


class _Source:
    """One stream of one rank."""

    __slots__ = ("buffer", "delay", "exposed", "rank", "stream")

    def __init__(self, rank: int, stream: StreamName) -> None:
        self.rank = rank
        self.stream: StreamName = stream
        self.buffer = LineBuffer()
        self.exposed = False
        self.delay = PARTIAL_S


class CellModel:
    """State of one cell's output.

    Args:
        ranks: How many ranks the run has.
        mode: What to show of them.
        quiet: Streams only, no header and footer, nothing that depends on time.
        live_bars: Whether the front end can update displays in place.
        max_lines: Lines that the cell stores; None where nothing is stored (a terminal).
        tty: Whether stdout is a terminal: the text of a single rank then passes as it is.
        run_id: Makes the display ids unique in the notebook.
        directory: Of the log files, named where lines are left out.
    """

    def __init__(
        self,
        ranks: int,
        mode: OutputMode,
        *,
        quiet: bool,
        live_bars: bool,
        max_lines: int | None = 2_000,
        tty: bool = False,
        run_id: str = "run",
        directory: str = "",
    ) -> None:
        self._mode = mode
        self._quiet = quiet
        self._live = live_bars and not quiet
        self._solo = mode == "rank0" or (ranks == 1 and mode != "tabs")
        self._raw = tty and self._solo and not self._live and not quiet
        self._now = 0.0
        name = f"air-{run_id}"
        self._name = name
        self._sources = [{s: _Source(rank, s) for s in _STREAMS} for rank in range(ranks)]
        self._displays = Displays(name)
        self._noted_widget = False
        self._page = Page(
            live=self._live,
            max_lines=max_lines,
            name=name,
            directory="" if quiet else directory,
            live_lines=self._live_lines,
        )
        self._folder: Folder | None = None
        if mode == "merged" and ranks > 1:
            self._folder = Folder(
                ranks,
                wait_s=QUIET_S if quiet else FOLD_S,
                start_s=QUIET_S if quiet else START_S,
                look_s=QUIET_S if quiet else LOOK_S,
                max_queued=_QUIET_QUEUED if quiet else _QUEUED,
                max_chars=_QUIET_QUEUED_CHARS if quiet else _QUEUED_CHARS,
            )
        self._tabs: Tabs | None = None
        if mode == "tabs":
            self._tabs = Tabs(ranks, live=self._live, key=f"{name}-tabs", live_lines=self._unfinished)

    # ------------------------------------------------------------------------------------------------------ inputs

    def header(self, text: str, now: float, link: Link | None = None) -> list[Action]:
        """The line above the output; again to change it."""
        return self._headline("header", text, now, link)

    def footer(self, text: str, now: float, link: Link | None = None) -> list[Action]:
        """The line below the output; after ``finish``."""
        return self._headline("footer", text, now, link)

    def feed(self, event: RankEvent, now: float) -> list[Action]:
        """Take one event."""
        return self.feed_all((event,), now)

    def feed_all(self, events: Iterable[RankEvent], now: float) -> list[Action]:
        """Take what was read together: equal lines then fold however many came at once.

        ``clear_output`` of a rank empties the cell if it is the only one shown; else only what is unfinished of that
        rank (and, with tabs, its section), because the rest of the cell is not its own.
        """
        self._now = now
        for event in events:
            if self._mode == "none" or (self._mode == "rank0" and event.rank != 0):
                continue
            match event:
                case Text():
                    self._text(event, now)
                case Rich():
                    self._rich(event, now)
                case RankBegan():
                    self._begin(event.rank, now)
                case RankEnded():
                    self._begin(event.rank, now)
                    self._end(event.rank)
                case _:
                    assert_never(event)
        return self._take(now)

    def tick(self, now: float) -> list[Action]:
        """Do what was due by now."""
        self._now = now
        if not self._quiet:
            for source in self._busy():
                self._tick_source(source, now)
        return self._take(now)

    def next_deadline(self, now: float) -> float | None:  # noqa: ARG002 - the caller's clock, in case a rule needs it
        """When ``tick`` is needed next, on the clock of ``now``; None if only an event can change anything."""
        times = [self._page.deadline()]
        if self._folder is not None:
            times.append(self._folder.deadline())
        if self._tabs is not None:
            times.append(self._tabs.deadline())
        if not self._quiet:
            times.extend(self._due(source) for source in self._busy())
        return min((time for time in times if time is not None), default=None)

    def finish(self, now: float) -> list[Action]:
        """All ranks are gone or given up: show what is still held back."""
        self._now = now
        if self._mode != "none":
            for rank in range(len(self._sources)):
                self._end(rank)
        actions = self._take(now)
        if self._tabs is not None:
            actions += self._tabs.finish()
        self._page.finish()
        return actions + self._page.take(now)

    # ------------------------------------------------------------------------------------------------------ events

    def _headline(self, which: str, text: str, now: float, link: Link | None) -> list[Action]:
        if self._quiet:
            return []
        self._page.headline(headline(text, link), f"{self._name}-{which}")
        return self._page.take(now)

    def _text(self, event: Text, now: float) -> None:
        streams = self._sources[event.rank]
        source = streams[event.stream]
        if self._raw:
            self._page.raw(event.stream, event.text)
            return
        self._settle_others(event.rank, event.stream)
        buffer = source.buffer
        text = buffer.prepare(event.text)
        passes = self._solo and not self._quiet and buffer.idle and buffer.is_plain(text)
        if passes and self._page.raw(event.stream, text):
            return
        if self._is_flood(text):
            text = self._skip(source, text)
        self._push(source, buffer.add(text, now), bar=buffer.drawing)
        source.exposed = buffer.since is not None and (source.exposed or (self._solo and self._live))
        if buffer.drawing or source.exposed:
            self._touch()

    def _rich(self, event: Rich, now: float) -> None:
        if event.kind == "clear_output":
            self._clear(event)
            return
        for source in self._sources[event.rank].values():
            self._push(source, source.buffer.settle(), bar=True)
            if source.buffer.since is not None:
                self._push(source, [source.buffer.take_partial()])
        textual = without_widget(event)
        if textual is not None:
            event = textual
            if not self._noted_widget:
                self._noted_widget = True
                self._page.line(_WIDGET_NOTE, "stderr", ())
        text = plain_text(event)
        # A display of mere text stays a display where it cannot fold with others.
        if text is not None and (event.kind == "execute_result" or textual is not None or not self._solo):
            self._push(self._sources[event.rank]["stdout"], text.split("\n"))
            return
        item = Item(digest(event), "rich", now, event)
        if self._folder is not None:
            self._folder.push(event.rank, [item])
        else:
            self._release(Released((event.rank,), (item,)))

    def _begin(self, rank: int, now: float) -> None:
        if self._folder is not None:
            self._folder.begin(rank, now)

    def _end(self, rank: int) -> None:
        for source in self._sources[rank].values():
            bar = source.buffer.drawing
            self._push(source, source.buffer.close(), bar=bar)
        if self._folder is not None:
            self._folder.end(rank)
        if self._tabs is not None:
            self._tabs.end(rank)

    def _clear(self, event: Rich) -> None:
        for source in self._sources[event.rank].values():
            source.buffer.clear()
            source.exposed = False
        self._touch()
        if self._solo:
            self._page.clear(wait=event.wait)
        elif self._tabs is not None:
            self._tabs.empty(event.rank)

    # ------------------------------------------------------------------------------------------------------ lines

    def _settle_others(self, rank: int, stream: StreamName) -> None:
        """A finished bar comes before what the rank wrote to its other stream afterwards."""
        for other in self._sources[rank].values():
            if other.stream != stream and other.buffer.unsettled_since is not None:
                self._push(other, other.buffer.settle(), bar=True)

    def _push(self, source: _Source, lines: Sequence[str], *, bar: bool = False) -> None:
        if not lines:
            return
        source.delay = PARTIAL_S
        if self._tabs is not None:
            self._tabs.add(source.rank, lines)
        elif self._folder is not None:
            now, stream = self._now, source.stream
            self._folder.push(source.rank, [Item(line, stream, now, None, bar) for line in lines])
        else:
            prefix = "" if self._solo else f"[{source.rank}] "
            ranks = (source.rank,)
            for line in lines:
                self._page.line(prefix + line, source.stream, ranks)

    def _release(self, released: Released) -> None:
        """Show what several ranks, or one, have made."""
        first = released.items[0]
        if first.rich is None:
            stream: StreamName = "stderr" if first.stream == "stderr" else "stdout"
            self._page.line(f"{label(released.ranks)} {first.text}", stream, released.ranks)
            return
        events = [item.rich for item in released.items if item.rich is not None]
        if first.rich.kind != "update_display_data":
            self._show(released.ranks, first.rich, self._displays.show(events))
            return
        for key, ranks, is_new in self._displays.update(events):
            if is_new:
                self._show(ranks, first.rich, key)
            else:
                self._page.update(first.rich.data, first.rich.metadata, key)

    def _show(self, ranks: tuple[int, ...], event: Rich, key: str | None) -> None:
        if not self._solo:
            self._page.line(label(ranks), "stdout", ranks)
        self._page.show(event.data, event.metadata, key)

    def _is_flood(self, text: str) -> bool:
        """Whether there are more lines than could be kept, so that the older ones need not be made."""
        if "\r" in text:
            return False
        if self._tabs is not None:
            return text.count("\n") > TAIL_LINES
        if self._quiet or not self._page.is_full:
            return False
        return len(text) > self._page.tail_chars or text.count("\n") > self._page.tail_lines

    def _skip(self, source: _Source, text: str) -> str:
        """Count all but the last lines, together with what of this rank is still waiting."""
        most = TAIL_LINES if self._tabs is not None else self._page.tail_lines
        room = max(len(text) - self._page.tail_chars, 0)
        kept = text[room:].rsplit("\n", most + 1) if text.count("\n", room) > most else text[room:].split("\n", 1)
        start = room + len(kept[0]) + 1
        if start > len(text):
            return text
        skipped = text.count("\n", 0, start)
        source.buffer.clear()
        if self._tabs is not None:
            self._tabs.skip(source.rank, skipped)
        else:
            for item in self._folder.drop(source.rank) if self._folder is not None else ():
                if item.rich is None:
                    self._page.skip(source.rank, "stderr" if item.stream == "stderr" else "stdout", 1)
                else:
                    self._release(Released((source.rank,), (item,)))
            self._page.skip(source.rank, source.stream, skipped)
        return text[start:]

    # ------------------------------------------------------------------------------------------------- what is live

    def _busy(self) -> list[_Source]:
        return [
            source
            for streams in self._sources
            for source in streams.values()
            if source.buffer.since is not None or source.buffer.unsettled_since is not None
        ]

    def _due(self, source: _Source) -> float | None:
        buffer = source.buffer
        if buffer.unsettled_since is not None:
            return buffer.unsettled_since + SETTLE_S
        if buffer.since is not None and not source.exposed:
            return buffer.since + source.delay
        return None

    def _tick_source(self, source: _Source, now: float) -> None:
        due = self._due(source)
        if due is None or now < due:
            return
        if source.buffer.unsettled_since is not None:
            self._push(source, source.buffer.settle(), bar=True)
        elif self._live:
            source.exposed = True
            self._touch()
        else:
            # Twice as long for the next piece: dots printed one by one must not become one line each.
            delay = source.delay * 2
            self._push(source, [source.buffer.take_partial()])
            source.delay = delay

    def _touch(self) -> None:
        if self._tabs is not None:
            self._tabs.touch()
        else:
            self._page.touch()

    def _unfinished(self, rank: int) -> list[str]:
        return [
            line
            for source in self._sources[rank].values()
            if source.buffer.drawing or source.exposed
            for line in source.buffer.live()
        ]

    def _live_lines(self) -> list[str]:
        """Bars and other unfinished lines, one per rank and row, equal ones folded."""
        rows: dict[tuple[int, str], list[int]] = {}
        for rank in range(len(self._sources)):
            # A bar that is finished but still waits to be folded must not vanish for that time.
            done = [item.text for item in self._folder.queued(rank) if item.bar] if self._folder is not None else []
            for index, line in enumerate([*done, *self._unfinished(rank)]):
                rows.setdefault((index, line), []).append(rank)
        if self._solo:
            return [line for _, line in rows]
        return [f"{label(tuple(ranks))} {line}" for (_, line), ranks in rows.items()]

    def _take(self, now: float) -> list[Action]:
        if self._folder is not None:
            for released in self._folder.release(now):
                self._release(released)
                self._folder.look_ahead = not self._page.is_full
        actions: list[Action] = [] if self._tabs is None else self._tabs.take(now)
        return actions + self._page.take(now)


_STREAMS: tuple[StreamName, ...] = ("stdout", "stderr")
