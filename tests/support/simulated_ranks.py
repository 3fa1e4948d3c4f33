"""Ranks and their loader workers without processes: threads that meet, and sources that are asked in turn.

The loader is the real one. What is simulated is what torch does below it: requests go round the workers, each of which
has some ahead, and answers come back in the order of the requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from air_nb.data import DataLoader, stream
from air_nb.data.items import ItemSource
from air_nb.data.stream import StreamSource

__all__ = ["Grid", "World", "worker_info"]

_TIMEOUT_S = 60.0
_worker = threading.local()


def worker_info() -> Any:
    """What torch's function of that name says in a simulated worker."""
    return getattr(_worker, "info", None)


@dataclass(frozen=True)
class Grid:
    """Ranks, loader workers of each, batches that each worker has ahead, rows of a batch."""

    world_size: int
    num_workers: int
    prefetch_factor: int
    batch_size: int | None


@dataclass
class _Meeting:
    """Where the ranks exchange values."""

    world_size: int
    values: list[Any] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.values = [None] * self.world_size
        self.barrier = threading.Barrier(self.world_size, timeout=_TIMEOUT_S)


class _MetRanks:
    can_talk = True

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world_size = meeting.world_size
        self._meeting = meeting

    def gather(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait()
        gathered = list(self._meeting.values)
        self._meeting.barrier.wait()
        return gathered

    def largest(self, values: Sequence[int]) -> list[int]:
        return [max(column) for column in zip(*self.gather(values), strict=True)]


class _SimulatedFeed:
    def __init__(self, reader: Any, grid: Grid, *, streams: bool) -> None:
        self._sources = [
            StreamSource(reader) if streams else ItemSource(reader) for _ in range(max(1, grid.num_workers))
        ]
        self._ahead = grid.num_workers * grid.prefetch_factor
        self._has_workers = grid.num_workers > 0
        self._requests: Iterator[Any] = iter(())
        self._answers: deque[Any] = deque()
        self._number = 0

    def open(self, requests: Iterator[Any], seed: int, name: Any) -> None:
        self._requests, self._number = requests, 0
        self._answers.clear()
        self._ask(self._ahead)

    def close(self) -> None:
        self._requests = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._ask(1)
        if not self._answers:
            raise StopIteration
        return self._answers.popleft()

    def _ask(self, count: int) -> None:
        for _, request in zip(range(count), self._requests, strict=False):
            worker = self._number % len(self._sources)
            source = self._sources[worker]
            info = SimpleNamespace(id=worker, num_workers=len(self._sources), dataset=source)
            _worker.info = info if self._has_workers else None
            self._answers.append(source.__getitems__(request))
            _worker.info = None
            self._number += 1


class _SimulatedLoader(DataLoader):
    def __init__(self, dataset: Any, grid: Grid, ranks: _MetRanks, **arguments: Any) -> None:
        super().__init__(dataset, grid.batch_size, num_workers=0, seed_examples=False, collate_fn=_as_list, **arguments)
        self._settings = replace(self._settings, num_workers=grid.num_workers)
        self._feed = _SimulatedFeed(self._reader, grid, streams=hasattr(dataset, "examples"))  # type: ignore[assignment]
        self._met = ranks

    def _ranks(self) -> Any:
        return self._met


def _as_list(rows: Any) -> Any:
    return rows if isinstance(rows, list) else [rows]


class World:
    """The ranks of one run, each with its loader."""

    def __init__(self, dataset: Any, grid: Grid, **arguments: Any) -> None:
        meeting = _Meeting(grid.world_size)
        self._meeting = meeting
        self.loaders = [
            _SimulatedLoader(dataset, grid, _MetRanks(rank, meeting), **arguments) for rank in range(grid.world_size)
        ]
        self._iterators: list[Iterator[Any]] = []

    def on_all(self, function: Callable[[int], Any]) -> list[Any]:
        """Call a function with each rank, all at the same time."""
        if self._meeting.world_size == 1:
            return [function(0)]
        results: list[Any] = [None] * self._meeting.world_size
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:  # noqa: BLE001  # raised below
                errors.append(error)
                self._meeting.barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self._meeting.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        assert not errors, "the ranks did not all come to a collective"
        return results

    def begin(self) -> None:
        """Make an iterator on each rank."""
        self._iterators = self.on_all(lambda rank: iter(self.loaders[rank]))

    def step(self) -> list[list[Any]] | None:
        """One step of the training on all ranks: the rows that count, by rank; None if the pass is over for all."""

        def advance(rank: int) -> Any:
            batch = next(self._iterators[rank], None)
            if batch is None:
                return None
            valid = self.loaders[rank].valid.tolist()
            assert len(valid) == len(batch) >= 1
            return [row for row, counts in zip(batch, valid, strict=True) if counts]

        rows = self.on_all(advance)
        if None in rows:
            assert rows == [None] * len(rows), "the ranks took unequally many steps"
            return None
        return rows

    def state(self) -> Any:
        """The state, which is the same on all ranks."""
        states = self.on_all(lambda rank: self.loaders[rank].state_dict())
        assert all(state == states[0] for state in states)
        return states[0]

    def load(self, state: Any) -> None:
        """Restore the state on all ranks."""
        self.on_all(lambda rank: self.loaders[rank].load_state_dict(state))


@pytest.fixture
def simulated_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sources believe that they are in a worker."""
    monkeypatch.setattr(stream, "get_worker_info", worker_info)
