"""Reading work items, in a loader worker or, without workers, in the main process: it keeps nothing between batches.

What is to be read comes with each batch, and what the parent has to know about it goes back beside the batch: rows that
are real, items that could not be read, files that are pinned for it.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate, default_convert, get_worker_info

from air_nb.data.cache import CacheMetrics
from air_nb.data.dataset import Files
from air_nb.data.example_rng import GeneratorStates, seed_example
from air_nb.data.leases import Lease
from air_nb.errors import DataError

__all__ = [
    "Collate",
    "Delivery",
    "Failure",
    "ItemSource",
    "Notes",
    "OnError",
    "Reader",
    "Work",
    "release",
]

_RETRY_WAITS_S = (0.1, 0.5)
_SPARES = 16  # how many other items are tried for a batch of which none can be read


class OnError(StrEnum):
    """What an item that can't be read leads to."""

    RAISE = "raise"
    """An error that names it."""
    SKIP = "skip"
    """It is left out: it counts as consumed, and the state lists it."""
    RETRY = "retry"
    """It is tried twice more, 0.1 s and 0.5 s later; then an error."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an item could not be read.

    Attributes:
        item: Work item.
        text: What it is called, and type and text of the exception.
        traceback: Formatted, from where it happened.
    """

    item: int
    text: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Notes:
    """What the parent has to know about a batch.

    Attributes:
        valid: For each row whether it counts: not one that only fills the batch.
        failures: Items that could not be read.
        fatal: Whether these end the iteration.
        leases: They keep the files of the batch in the cache.
        cache: What the cache has done in this process since the last answer; None without a cache.
    """

    valid: tuple[bool, ...]
    failures: tuple[Failure, ...] = ()
    fatal: bool = False
    leases: tuple[Lease, ...] = ()
    cache: CacheMetrics | None = None


class Delivery(NamedTuple):
    """What a worker answers. A named tuple, so that torch pins the memory of the batch in it."""

    batch: Any
    notes: Any


@dataclass(frozen=True, slots=True)
class Work:
    """The rows of one batch.

    Attributes:
        epoch: Number of the epoch.
        items: Items whose rows count.
        fillers: Items that only fill the batch.
        rows: How many rows the batch has if all can be read; None: as many as there are, and at least one.
    """

    epoch: int
    items: tuple[int, ...]
    fillers: tuple[int, ...]
    rows: int | None


@dataclass(frozen=True, slots=True)
class Collate:
    """Makes a batch of rows as torch does.

    Attributes:
        function: The user's ``collate_fn``; None: torch's own, or a plain list of paths.
        single: One row is the batch (``batch_size=None``).
    """

    function: Callable[[Any], Any] | None
    single: bool

    def __call__(self, rows: Sequence[Any]) -> Any:
        """Make the batch."""
        given = rows[0] if self.single else list(rows)
        if self.function is not None:
            return self.function(given)
        if isinstance(rows[0], os.PathLike):  # torch's knows strings but no paths
            return given
        torchs: Callable[[Any], Any] = default_convert if self.single else default_collate
        return torchs(given)


@dataclass(frozen=True, slots=True)
class Reader:
    """How items of a data set are read.

    Attributes:
        dataset: The user's data set.
        seed: Seed of the training.
        seed_examples: Whether random numbers are seeded for each example.
        on_error: What an item that can't be read leads to.
        collate: Makes a batch of rows.
    """

    dataset: Any
    seed: int
    seed_examples: bool
    on_error: OnError
    collate: Collate

    @property
    def files(self) -> Files | None:
        """The data set, if it is one of files whose items are what that makes of them."""
        return self.dataset if isinstance(self.dataset, Files) and self.dataset.is_plain else None

    def read(self, item: int) -> tuple[Any, Lease | None]:
        """Read one item, and lease its file if it is a path of the cache."""
        files = self.files
        return (self.dataset[item], None) if files is None else files.leased(item)

    def read_together(self, items: Sequence[int]) -> tuple[list[Any], Exception | None] | None:
        """Let the data set read items together, if it can.

        Returns:
            What was read, and why the item after it could not be; None: they are to be read one by one.
        """
        files = self.files
        if files is not None:
            # Paths have leases; who retries has to be asked for the item that failed.
            is_able = files.decode is not None and self.on_error is not OnError.RETRY
            return files.decoded(items) if is_able else None
        read = getattr(self.dataset, "__getitems__", None)
        if read is None:
            return None
        try:
            rows = list(read([*items]))
        except Exception:  # noqa: BLE001  # one by one tells which item it is
            return None
        return (rows, None) if len(rows) == len(items) else None

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Read something, more than once if errors are to be retried.

        Raises:
            Exception: That of the last attempt.
        """
        for wait_s in _RETRY_WAITS_S if self.on_error is OnError.RETRY else ():
            try:
                return action()
            except Exception:  # noqa: BLE001  # the user's decoder may raise anything; the last attempt lets it out
                time.sleep(wait_s)
        return action()

    def name(self, item: int) -> str:
        """What an item is called in messages."""
        manifest = getattr(self.dataset, "manifest", None)
        return f"item {item}" if manifest is None else f"item {item} ({manifest[item].url})"

    def failure(self, item: int, error: Exception) -> Failure:
        """Describe an error, for a process that may not have its class."""
        text = f"{self.name(item)}: {type(error).__name__}: {error}"
        if isinstance(error, DataError):  # it names the file itself
            text = str(error)
        return Failure(item, text, "".join(traceback.format_exception(error)))

    def cache_metrics(self) -> CacheMetrics | None:
        """What the cache has done in this process; None without one."""
        metrics = self.dataset.metrics() if getattr(self.dataset, "cache", None) is not None else None
        return metrics if isinstance(metrics, CacheMetrics) else None

    @contextmanager
    def own_generators(self) -> Iterator[None]:
        """For reading with seeds: in the main process the global generators, the model's, are put back after it."""
        if get_worker_info() is not None or not self.seed_examples:
            yield
            return
        before = GeneratorStates.now()
        try:
            yield
        finally:
            before.restore()


class ItemSource(torch.utils.data.Dataset[Delivery]):
    """What torch's DataLoader takes for the data set: it is asked for ``Work``, and answers with a ``Delivery``."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._told: CacheMetrics | None = None
        self._something_draws = False
        self._before: GeneratorStates | None = None  # the newest batch; in a loader worker nobody draws between batches

    def __getitems__(self, work: Work) -> Delivery:
        """Read a batch; torch calls this with what the batch sampler yielded, whatever that is."""
        if self._reader.seed_examples:
            batch, notes = self._read_reproducibly(work)
        else:
            batch, notes = _Batch(self._reader, work, seeded=False).read()
        # Not dataclasses.replace, which takes three times as long.
        return Delivery(batch, Notes(notes.valid, notes.failures, notes.fatal, notes.leases, self._cache_news()))

    def _read_reproducibly(self, work: Work) -> Delivery:
        """Read a batch with seeds, or without as long as nothing has ever drawn: that comes to the same."""
        if not self._something_draws:
            is_worker = get_worker_info() is not None
            before = self._before if is_worker and self._before else GeneratorStates.now(self._before)
            self._before = before
            try:
                delivery = _Batch(self._reader, work, seeded=False).read()
            except Exception:
                if before.is_now():
                    raise
            else:
                if before.is_now():
                    return delivery
                release(delivery.notes.leases)
            before.restore()
            self._something_draws, self._before = True, None
        with self._reader.own_generators():
            return _Batch(self._reader, work, seeded=True).read()

    def _cache_news(self) -> CacheMetrics | None:
        metrics = self._reader.cache_metrics()
        told, self._told = self._told, metrics
        return metrics if metrics is None or told is None else metrics - told

    def __getitem__(self, _index: Any) -> Delivery:
        msg = "batches are asked for as a whole"
        raise TypeError(msg)


class _Batch:
    """One batch while it is being read."""

    def __init__(self, reader: Reader, work: Work, *, seeded: bool) -> None:
        self._reader = reader
        self._work = work
        self._seeded = seeded
        self._rows: list[Any] = []
        self._valid: list[bool] = []
        self._leases: list[Lease] = []
        self._failures: list[Failure] = []

    def read(self) -> Delivery:
        try:
            self._add(self._work.items, valid=True)
            self._add(self._work.fillers, valid=False)
            self._fill()
            if self._fatal or not self._rows:
                release(self._leases)
                return Delivery(None, Notes((), tuple(self._failures), fatal=True))
            notes = Notes(tuple(self._valid), tuple(self._failures), leases=tuple(self._leases))
            return Delivery(self._reader.collate(self._rows), notes)
        except BaseException:
            release(self._leases)
            raise

    @property
    def _fatal(self) -> bool:
        return bool(self._failures) and self._reader.on_error is not OnError.SKIP

    def _add(self, items: Sequence[int], *, valid: bool) -> None:
        """Read rows; after an error that ends the iteration no more are read."""
        while items and not self._fatal:
            # A seed of its own for each example takes reading one by one.
            together = None if self._seeded else self._reader.read_together(items)
            if together is None:
                for item in items:
                    if not self._fatal:
                        self._add_one(item, valid=valid)
                return
            rows, error = together
            self._rows += rows
            self._valid += [valid] * len(rows)
            if error is not None:
                self._note(items[len(rows)], error, valid=valid)
            items = items[len(rows) + 1 :]

    def _add_one(self, item: int, *, valid: bool) -> None:
        try:
            value, lease = self._reader.attempt(partial(self._read, item))
        except Exception as error:  # noqa: BLE001  # the border to the user's code; the parent reports it
            self._note(item, error, valid=valid)
            return
        self._rows.append(value)
        self._valid.append(valid)
        if lease is not None:
            self._leases.append(lease)

    def _note(self, item: int, error: Exception, *, valid: bool) -> None:
        if valid or self._reader.on_error is not OnError.SKIP:  # a filler is some other rank's to report
            self._failures.append(self._reader.failure(item, error))

    def _read(self, item: int) -> tuple[Any, Lease | None]:
        if self._seeded:
            seed_example(self._reader.seed, self._work.epoch, item)
        return self._reader.read(item)

    def _fill(self) -> None:
        """Make up for rows that could not be read: all ranks take equally many steps."""
        first = (self._work.items + self._work.fillers)[0]
        n_items = len(self._reader.dataset)
        for spare in range(1, min(_SPARES, n_items - 1) + 1):
            if self._rows:
                break
            self._add(((first + spare) % n_items,), valid=False)
        missing = (self._work.rows or 0) - len(self._rows)
        if self._rows and missing > 0:
            self._rows += [self._rows[0]] * missing
            self._valid += [False] * missing


def release(leases: Sequence[Lease]) -> None:
    """Release all."""
    for lease in leases:
        lease.release()
