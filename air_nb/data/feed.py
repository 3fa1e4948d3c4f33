"""torch's own DataLoader, told what to read one request at a time: start methods, prefetching and pinning are its.

The parent makes the requests, so it knows what was asked of whom, and what has not been delivered. Where there are no
workers and nothing is pinned, it asks the source itself: torch's part would cost 1 to 2 us per file and do nothing.
"""

# ruff: noqa: SLF001  # torch offers no public way to its workers, and they are ours to end

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Protocol, cast

import torch

from air_nb.data.items import Delivery
from air_nb.data.workers import WorkerStart, describe_deaths, kill, tensor_bytes, warn_if_shm_is_short
from air_nb.errors import DataError

__all__ = ["Feed", "FeedOptions"]

_FIRST = 10  # finalizers of multiprocessing run from high to low, those of processes and queues are at 0 and below


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """What torch's DataLoader is given.

    Attributes:
        num_workers: Number of loader workers.
        arguments: Other keyword arguments of torch's.
        worker_init_fn: The user's own, called in each worker.
    """

    num_workers: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    worker_init_fn: Callable[[int], None] | None = None


class Source(Protocol):
    """Reads what it is asked for. torch's fetcher finds the method by its name."""

    def __getitems__(self, request: Any, /) -> Delivery:
        """Read."""


class Feed:
    """Answers to requests, in the order of the requests. Used by one thread.

    Nothing that it holds leads back to it: persistent workers end when the last reference to their loader goes. Left to
    the garbage collector, which ends their queues first, they would have to be killed, after 5 s each.
    """

    def __init__(self, source: Source, options: FeedOptions) -> None:
        """Prepare; nothing is started.

        Args:
            source: Reads, in a worker.
            options: For torch.
        """
        self._source = source
        self._answers: Any = None
        self._at_exit: Finalize | None = None
        self._name: Callable[[Any, int], str] = _nothing
        self._num_workers = options.num_workers
        self._requests = _Requests()
        self._generator = torch.Generator()
        self._loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            cast("torch.utils.data.Dataset[Any]", source),
            batch_sampler=self._requests,  # not lists of indices: what our source takes
            num_workers=options.num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=WorkerStart(options.worker_init_fn),
            generator=self._generator,  # else starting a pass would draw from the generator of the model
            **options.arguments,
        )
        self._measured = False

    def open(self, requests: Iterator[Any], seed: int, name: Callable[[Any, int], str]) -> None:
        """Begin to answer other requests; workers are started, or go on if they are persistent.

        Args:
            requests: What to read; they are asked for ahead of the answers.
            seed: Seed of the workers' random numbers where examples have none of their own.
            name: Says what a request has the worker of that number read, for the message about its death.

        Raises:
            DataError: A persistent worker has died since the last pass.
        """
        self.close()
        self._require_workers()
        self._name = name
        # A timeout without workers is left to torch, which refuses it.
        if not (self._num_workers or self._loader.pin_memory or self._loader.timeout):
            self._answers = map(self._source.__getitems__, requests)
            return
        self._requests.begin(requests)
        self._generator.manual_seed(seed)
        self._answers = iter(self._loader)
        if self._workers() and self._answers._worker_pids_set:
            # torch's handler of SIGCHLD raises wherever the program is: in the middle of a step, or of a checkpoint.
            torch._C._remove_worker_pids(id(self._answers))
            self._answers._worker_pids_set = False
        for worker in self._workers():
            worker.terminate = worker.kill  # type: ignore[method-assign]  # torch's last resort; they ignore SIGTERM
        if self._num_workers and self._at_exit is None:
            self._at_exit = Finalize(None, _end_at_exit, (weakref.ref(self),), exitpriority=_FIRST)

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        """The next answer.

        Raises:
            DataError: A loader worker died.
            Exception: What a user's ``collate_fn`` raised.
        """
        answer: Delivery = self._next_of_workers() if self._num_workers else next(self._answers)
        if self._requests.sent:
            self._requests.sent.popleft()
        return answer

    def _next_of_workers(self) -> Delivery:
        self._require_workers()
        number = id(self._answers)
        # torch raises if a worker dies while we wait for its answer.
        torch._C._set_worker_pids(number, tuple(worker.pid for worker in self._workers() if worker.pid))
        try:
            try:
                answer: Delivery = next(self._answers)
            finally:
                torch._C._remove_worker_pids(number)
        except RuntimeError as error:
            self._require_workers(error)
            raise
        if not self._measured and answer.batch is not None:
            self._measured = True
            ahead = self._num_workers * (self._loader.prefetch_factor or 1)
            warn_if_shm_is_short(tensor_bytes(answer.batch), ahead)
        return answer

    def _require_workers(self, error: RuntimeError | None = None) -> None:
        """Raise if a worker has died."""
        died = describe_deaths(self._workers(), self._reading)
        if died is not None:
            self._end()
            raise DataError(died) from error

    def close(self) -> None:
        """Stop asking; workers end unless they are persistent."""
        self._requests.end()
        self._name = _nothing
        if not self._loader.persistent_workers:
            self._end()

    def _end(self) -> None:
        if self._workers():
            # What torch does when its iterator is collected, which may be late: an exception's traceback holds it.
            self._answers._shutdown_workers()
            self._requests.sent.clear()
            self._loader._iterator = None  # persistent workers: the next pass starts others
        self._answers = None

    def end_at_exit(self) -> None:
        """End the workers when Python ends: it would wait for them, after a SIGTERM that they ignore."""
        kill(self._workers())

    def __del__(self) -> None:
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._end()

    def _workers(self) -> Sequence[BaseProcess]:
        workers: Sequence[BaseProcess] = getattr(self._answers, "_workers", ())
        return workers

    def _reading(self) -> dict[int, str]:
        """What each worker was asked for and has not answered: requests go round."""
        reading: dict[int, str] = {}
        for number, request in self._requests.sent:
            worker = number % self._num_workers
            if worker not in reading:
                reading[worker] = self._name(request, worker)
        return reading


class _Requests:
    """The batch sampler: torch asks it for what to read next, ahead of the answers."""

    def __init__(self) -> None:
        self.sent: deque[tuple[int, Any]] = deque()
        self._requests: Iterator[Any] = iter(())

    def begin(self, requests: Iterator[Any]) -> None:
        self.sent.clear()
        self._requests = requests

    def end(self) -> None:
        self._requests = iter(())

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            try:
                request = next(self._requests)
            except StopIteration:
                return
            self.sent.append((number, request))
            number += 1
            yield request


def _nothing(_request: Any, _worker: int) -> str:
    return ""


def _as_it_is(answer: Any) -> Any:
    return answer


def _end_at_exit(feed: weakref.ref[Feed]) -> None:
    there = feed()
    if there is not None:
        there.end_at_exit()
