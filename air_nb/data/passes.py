"""One pass over what is left of an epoch: what is asked of the loader workers, and what is counted when it comes back.

A pass knows its epoch and no other; which one comes next is the loader's affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from air_nb.data.agree import Ranks
from air_nb.data.feed import Feed
from air_nb.data.items import Failure, Notes, Reader, Work
from air_nb.data.order import Order
from air_nb.data.partition import Split, Tail
from air_nb.data.position import Position, Progress
from air_nb.data.stream import Assembler, Deal, filler_example
from air_nb.errors import DataError

__all__ = ["Batch", "StreamPass", "StrictPass"]

_NAMED = 5  # items of a dead worker's batch that are named
_CHUNK = 1024  # rows whose items are computed at once: numpy's cost per call is that of hundreds of rows


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, and what goes with it.

    Attributes:
        value: What the loop gets.
        notes: What the loader has to know about it.
    """

    value: Any
    notes: Notes


class StrictPass:
    """One example per item: all ranks know where all are."""

    def __init__(self, feed: Feed, reader: Reader, split: Split, order: Order, start: Position) -> None:
        self._feed = feed
        self._reader = reader
        self._split = split
        self._order = order
        self.position = start
        self._left = split.steps(start.position)
        feed.open(self._requests(start.position), _worker_seed(order), self._name)

    def advance(self) -> Batch | None:
        """The next batch; None at the end of the epoch.

        Raises:
            DataError: An item could not be read, or a loader worker died.
        """
        if self._left == 0:
            return None
        value, notes = next(self._feed)
        if notes.fatal:
            raise unreadable(notes.failures)
        self._left -= 1
        following = self._split.after(self.position.position)
        ended = following == self._split.items
        self.position = self.position.next_epoch() if ended else Position(self.position.epoch, following)
        return Batch(value, notes)

    def _name(self, work: Work, _worker: int) -> str:
        items = work.items + work.fillers
        more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
        return ", ".join(self._reader.name(item) for item in items[:_NAMED]) + more

    def _requests(self, position: int) -> Iterator[Work]:
        """What this rank reads at each step; the items of many steps are computed at once."""
        steps = self._split.steps(position)
        chunk = max(1, _CHUNK // self._split.batch_size)
        rows = None if self._split.tail is Tail.EXACT else self._split.batch_size
        for first in range(0, steps, chunk):
            starts = range(
                position + first * self._split.step_size,
                position + min(first + chunk, steps) * self._split.step_size,
                self._split.step_size,
            )
            parts = [self._split.rows(start) for start in starts]
            wanted = [np.array([*part.positions, *part.fillers], dtype=np.int64) for part in parts]
            items = self._order.items_at(np.concatenate(wanted)).tolist()
            at = 0
            for part in parts:
                middle = at + len(part.positions)
                end = middle + len(part.fillers)
                yield Work(self._order.epoch, tuple(items[at:middle]), tuple(items[middle:end]), rows)
                at = end


class StreamPass:
    """Any number of examples per item: ranks drift apart, and agree at each step whether there is another."""

    def __init__(self, feed: Feed, reader: Reader, deal: Deal, *, tail: Tail, num_workers: int, ranks: Ranks) -> None:
        self._reader = reader
        self._deal = deal
        self._tail = tail
        self._ranks = ranks
        feed.open(repeat(deal), _worker_seed(deal.order), self._name)
        self._assembler = Assembler(feed, reader, deal, num_workers)
        self._filler: Any = None
        self._error: Exception | None = None

    @property
    def progress(self) -> list[Progress]:
        """How far this rank's workers have come."""
        return self._assembler.progress

    def advance(self) -> Batch | None:
        """The next batch; None at the end of the epoch. Collective: every rank calls.

        Raises:
            DataError: An item could not be read, a loader worker died, or another rank says so of itself.
        """
        rows = self._peek()
        most, negative_least, failed = self._ranks.largest([rows, -rows, self._error is not None])
        if failed:
            self._raise()
        if not self._another(most, -negative_least):
            return None
        fill_to = self._deal.batch_size if self._tail is Tail.PAD else 1
        failures, self._assembler.failures = tuple(self._assembler.failures), []
        if rows == 0:
            return Batch(self._fill(fill_to), Notes((False,) * fill_to, failures))
        value, valid = self._assembler.take(fill_to)
        return Batch(value, Notes(valid, failures))

    def has_more(self) -> bool:
        """Whether there is another step. Reads ahead. Collective: every rank calls."""
        rows = self._peek()
        most, negative_least, failed = self._ranks.largest([rows, -rows, self._error is not None])
        return bool(failed) or self._another(most, -negative_least)

    def _another(self, most: int, least: int) -> bool:
        return least == self._deal.batch_size if self._tail is Tail.DROP else most > 0

    def _peek(self) -> int:
        """Read ahead; an error waits until the ranks have heard of it, else they would wait for this one."""
        if self._error is not None:
            return 0
        try:
            rows = self._assembler.peek()
        except Exception as error:  # noqa: BLE001  # raised by advance(), on this rank
            self._error = error
            return 0
        if self._assembler.fatal:
            self._error = unreadable(tuple(self._assembler.failures))
        return rows

    def _raise(self) -> None:
        error, self._error = self._error, None  # its traceback holds this pass, and so would keep the loader workers
        try:
            if error is not None:
                raise error
        finally:
            del error
        msg = "another rank could not read its next batch; its own error says why"
        raise DataError(msg)

    def _name(self, deal: Deal, worker: int) -> str:
        """The worker's first item that was not delivered whole; it may have come further."""
        done = self.progress[worker]
        position = next(deal.base.remaining(deal.order.items, done.start + done.items * done.step, done.step), None)
        return "" if position is None else f"{self._reader.name(deal.order.item_at(position))} or one of its next items"

    def _fill(self, rows: int) -> Any:
        if self._filler is None:
            with self._reader.own_generators():
                self._filler = self._reader.collate([filler_example(self._reader, self._deal.order)] * rows)
        return self._filler


def unreadable(failures: tuple[Failure, ...]) -> DataError:
    """The error about items that could not be read."""
    names = "; ".join(failure.text for failure in failures)
    error = DataError(f"{names}. Repair or remove it, or leave such items out with on_error='skip'")
    error.add_note(failures[-1].traceback)
    return error


def _worker_seed(order: Order) -> int:
    return hash((order.seed, order.epoch)) & (2**63 - 1)
