"""The output of one run in one cell: model and drawing together. All calls come from the thread that waits."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from air_nb.protocol.events import RankEvent
from air_nb.tracking.links import Link
from air_nb.view.actions import Print
from air_nb.view.draw import Drawer, Front
from air_nb.view.model import CellModel, OutputMode

__all__ = ["CellView"]


class CellView:
    """What one run shows.

    Args:
        ranks: How many ranks the run has.
        mode: What to show of them.
        run_id: Part of the display ids: two runs of one name must not update each other's output.
        quiet: Streams only, no header and footer, the same output for the same cell on a loaded machine.
        front: Where the output goes (``detect_front()`` in the thread that calls).
        log_dir: Where the log files are, named where lines are left out.
    """

    def __init__(
        self, ranks: int, mode: OutputMode, run_id: str, *, quiet: bool, front: Front, log_dir: Path | None = None
    ) -> None:
        self._model = CellModel(
            ranks,
            mode,
            quiet=quiet,
            live_bars=front.live_bars,
            max_lines=2_000 if front.stored else None,
            tty=front.tty,
            run_id=run_id,
            directory="" if log_dir is None else str(log_dir),
        )
        self._drawer = Drawer(front)

    def start(self, header: str) -> None:
        """Show the header."""
        self.header(header)

    def header(self, text: str, link: Link | None = None) -> None:
        """Change the header, in place where that is possible (else nothing: the first one stays)."""
        self._drawer.draw(self._model.header(text, time.monotonic(), link))

    def warn(self, text: str) -> None:
        """Say something that is neither a rank's output nor in the header, on stderr."""
        self._drawer.draw([Print("stderr", f"{text}\n")])

    def feed(self, events: Iterable[RankEvent]) -> None:
        """Take what the ranks made, in the order of each rank."""
        self._drawer.draw(self._model.feed_all(events, time.monotonic()))

    def tick(self) -> None:
        """Do what is due; call it after ``timeout()`` seconds without events."""
        self._drawer.draw(self._model.tick(time.monotonic()))

    def timeout(self) -> float | None:
        """Seconds until ``tick`` is needed (never negative), None if only events can change anything."""
        now = time.monotonic()
        due = self._model.next_deadline(now)
        times = [None if due is None else max(due - now, 0.0), self._drawer.timeout()]
        return min((seconds for seconds in times if seconds is not None), default=None)

    def finish(self, footer: str = "", link: Link | None = None) -> None:
        """Show everything that is still held back, then the footer. Everything is flushed when this returns."""
        self._drawer.hold(self._model.finish(time.monotonic()))
        if footer:
            self._drawer.hold(self._model.footer(footer, time.monotonic(), link))
        self._drawer.close()
