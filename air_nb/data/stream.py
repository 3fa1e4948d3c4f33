"""Data sets whose items yield any number of examples: what a loader worker reads, and how batches come of it.

Each loader worker of each rank is dealt some of the remaining items, reads them one after the other and answers each
request with a full batch of examples, or, when it has no more, with the rest uncollated. The parent makes full batches
of the rests, and counts what was *delivered*: workers hold an open item, but no position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import get_worker_info

from air_nb.data.example_rng import seed_example
from air_nb.data.items import Delivery, Failure, OnError, Reader
from air_nb.data.order import Order
from air_nb.data.position import Position, deal

__all__ = ["Assembler", "Checkpointable", "Deal", "StreamNotes", "StreamSource", "filler_example"]


@runtime_checkable
class Checkpointable(Protocol):
    """A data set whose items (files, shards, documents) yield any number of examples each, none too.

    ``DataLoader`` deals the items to ranks and loader workers, and goes on in the middle of one after a restart, on any
    number of them. What must hold for that: ``examples(index, k)`` yields what ``examples(index)`` yields after its
    first k. Before each example the global random generators are seeded with its number, and before ``examples`` is
    called with the item's; what is drawn once for all examples of an item (their order, say) must therefore be drawn
    before ``examples`` returns its iterator, not in a generator's body.
    """

    def __len__(self) -> int:
        """Number of work items."""

    def examples(self, index: int, start: int = 0) -> Iterator[Any]:
        """The examples of one item.

        Args:
            index: The work item.
            start: How many examples to leave out: they were consumed before.
        """


@dataclass(frozen=True, slots=True)
class Deal:
    """What a rank's workers are to read in one pass over the data set.

    Attributes:
        number: Tells passes apart.
        order: The order of the epoch.
        base: What of it was consumed before.
        rank: The rank.
        world_size: Number of ranks.
        batch_size: Examples of a batch.
    """

    number: int
    order: Order
    base: Position
    rank: int
    world_size: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class StreamNotes:
    """What the parent has to know about an answer.

    Attributes:
        worker: Which worker.
        runs: For each item it has read from: number of examples, and whether it ended.
        full: The answer is a batch; else it is a list of examples, and the worker's last.
        failures: Items that could not be read on.
        fatal: Whether these end the iteration.
    """

    worker: int
    runs: tuple[tuple[int, bool], ...]
    full: bool
    failures: tuple[Failure, ...] = ()
    fatal: bool = False


class StreamSource(torch.utils.data.Dataset[Delivery]):
    """What torch's DataLoader takes for the data set: it is asked for the next batch of a ``Deal``."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._number = -1
        self._worker: _Worker | None = None

    def __getitems__(self, deal_: Deal) -> Delivery:
        """Read the next batch; torch calls this with what the batch sampler yielded, whatever that is."""
        if self._worker is None or self._number != deal_.number:
            info = get_worker_info()
            if info is not None and info.dataset is self:
                worker, num_workers = info.id, info.num_workers
            else:  # in the main process, or in a loader worker whose data set has a loader of its own
                worker, num_workers = 0, 1
            self._worker = _Worker(self._reader, deal_, worker, num_workers)
            self._number = deal_.number
        with self._reader.own_generators():
            return self._worker.next_batch()

    def __getitem__(self, _index: Any) -> Delivery:
        msg = "batches are asked for as a whole"
        raise TypeError(msg)


class _Worker:
    """The items dealt to one loader worker, read one after the other."""

    def __init__(self, reader: Reader, deal_: Deal, worker: int, num_workers: int) -> None:
        self._reader = reader
        self._deal = deal_
        self._worker = worker
        share = deal(deal_.rank, deal_.world_size, worker, num_workers)
        self._positions = deal_.base.remaining(deal_.order.items, share.start, share.step)
        self._item: int | None = None
        self._start = 0  # examples of the item at hand that are behind us
        self._examples: Iterator[Any] | None = None

    def next_batch(self) -> Delivery:
        rows: list[Any] = []
        runs: list[tuple[int, bool]] = []
        failures: list[Failure] = []
        while len(rows) < self._deal.batch_size and self._open():
            count = len(rows)
            ended = False
            try:
                ended = self._read_into(rows)
            except Exception as error:  # noqa: BLE001  # the border to the user's code; the parent reports it
                assert self._item is not None
                failures.append(self._reader.failure(self._item, error))
                if self._reader.on_error is not OnError.SKIP:
                    return Delivery(
                        None, StreamNotes(self._worker, (), full=False, failures=tuple(failures), fatal=True)
                    )
                ended = True
            runs.append((len(rows) - count, ended))
            if ended:
                self._item = self._examples = None
        full = len(rows) == self._deal.batch_size
        notes = StreamNotes(self._worker, tuple(runs), full, tuple(failures))
        return Delivery(self._reader.collate(rows) if full else rows, notes)

    def _open(self) -> bool:
        """Go to the next item if there is none at hand; False: there are no more."""
        if self._item is None:
            position = next(self._positions, None)
            if position is None:
                return False
            self._item = self._deal.order.item_at(position)
            self._start = self._deal.base.partial.get(position, 0)
        return True

    def _read_into(self, rows: list[Any]) -> bool:
        """Read examples of the item at hand until the batch is full; whether the item ended."""
        while len(rows) < self._deal.batch_size:
            example = self._reader.attempt(self._next_example)
            if example is _END:
                return True
            rows.append(example)
            self._start += 1
        return False

    def _next_example(self) -> Any:
        reader, epoch = self._reader, self._deal.order.epoch
        assert self._item is not None
        try:
            if self._examples is None:
                if reader.seed_examples:
                    seed_example(reader.seed, epoch, self._item)
                self._examples = iter(reader.dataset.examples(self._item, self._start))
            if reader.seed_examples:
                seed_example(reader.seed, epoch, self._item, self._start + 1)
            return next(self._examples, _END)
        except Exception:
            self._examples = None  # a generator that raised has ended: another attempt opens the item again
            raise


_END = object()


class Assembler:
    """Makes batches of what the workers answer, and counts what was delivered. One rank, one pass, in the parent."""

    def __init__(self, answers: Iterator[Delivery], reader: Reader, deal_: Deal, num_workers: int) -> None:
        """Begin a pass; ``answers`` come from torch's DataLoader, each to one request."""
        self._answers = answers
        self._reader = reader
        self._batch_size = deal_.batch_size
        self.progress = [deal(deal_.rank, deal_.world_size, worker, num_workers) for worker in range(num_workers)]
        self._busy = set(range(num_workers))
        self._ready: Delivery | None = None
        self._rests: deque[tuple[int, Any, bool]] = deque()  # worker, example or _END, in the order of their delivery
        self._n_rest = 0
        self.failures: list[Failure] = []
        self.fatal = False

    def peek(self) -> int:
        """Read ahead until the next batch is known; how many rows it has: fewer than a full batch only at the end."""
        while self._ready is None and self._n_rest < self._batch_size and self._busy and not self.fatal:
            self._take(next(self._answers))
        if self._ready is not None:
            return self._batch_size
        return min(self._n_rest, self._batch_size)

    def take(self, fill_to: int) -> tuple[Any, tuple[bool, ...]]:
        """Deliver the next batch and count it.

        Args:
            fill_to: A smaller batch is filled up to so many rows, with its first one.

        Returns:
            The batch, and for each row whether it counts.
        """
        if self._ready is not None:
            (batch, notes), self._ready = self._ready, None
            for examples, ended in notes.runs:
                self.progress[notes.worker].add(examples, ended=ended)
            return batch, (True,) * self._batch_size
        rows: list[Any] = []
        while self._rests and len(rows) < self._batch_size:
            worker, example, ended = self._rests.popleft()
            self.progress[worker].add(0 if ended else 1, ended=ended)
            if not ended:
                rows.append(example)
        self._n_rest -= len(rows)
        self._settle()
        missing = max(0, fill_to - len(rows))
        valid = (True,) * len(rows) + (False,) * missing
        with self._reader.own_generators():
            return self._reader.collate(rows + rows[:1] * missing), valid

    def _take(self, answer: Delivery) -> None:
        notes: StreamNotes = answer.notes
        self.failures += notes.failures
        if notes.fatal:
            self.fatal = True
        elif notes.full:
            self._ready = answer
        elif notes.worker in self._busy:  # else a request that was sent before its end was known
            self._busy.discard(notes.worker)
            rows = iter(answer.batch)
            for examples, ended in notes.runs:
                self._rests += [(notes.worker, next(rows), False) for _ in range(examples)]
                self._rests += [(notes.worker, None, True)] * ended
                self._n_rest += examples
            self._settle()

    def _settle(self) -> None:
        """Count the items that ended and of which no example is left to deliver."""
        while self._rests and self._rests[0][2]:
            worker, _, ended = self._rests.popleft()
            self.progress[worker].add(0, ended=ended)


def filler_example(reader: Reader, order: Order) -> Any:
    """An example for a rank that has none of its own: the first one of the epoch.

    Raises:
        LookupError: No item yields an example.
    """
    for position in range(order.items):
        item = order.item_at(position)
        if reader.seed_examples:
            seed_example(reader.seed, order.epoch, item, 1)
        try:
            example = next(iter(reader.dataset.examples(item, 0)), _END)
        except Exception:
            if reader.on_error is not OnError.SKIP:
                raise
            continue  # the rank that it was dealt to reports it
        if example is not _END:
            return example
    msg = f"none of the {order.items} items yields an example"
    raise LookupError(msg)
