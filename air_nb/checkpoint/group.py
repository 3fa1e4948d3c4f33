"""How the ranks agree: over gloo groups of our own, in named phases, so that whoever is missing is named.

Everything here is collective: every rank calls it, in the same order. A phase ends on all ranks alike: with the values
of all, or, if it failed on any, with an error that says on which and why. The groups are ours because the job's own may
be NCCL only, and because a save in a thread of its own must not get between the collectives of the training.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from air_nb.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DataError,
    ManifestChangedError,
)

__all__ = ["Ranks"]

_T = TypeVar("_T")

# In this order: what no other checkpoint would cure first.
_KINDS: tuple[type[Exception], ...] = (
    CheckpointMismatchError,
    ManifestChangedError,
    DataError,
    CheckpointNotFoundError,
    CheckpointError,
    CheckpointDamagedError,
)


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    host: str
    kind: int  # index in _KINDS: a class could be one that other ranks can't import
    text: str


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[_T]):
    """How an action ended on one rank."""

    value: _T | None
    failure: _Failure | None = None


class Ranks:
    """The ranks of the job, or the one process that there is. Collective: every rank makes one.

    Args:
        timeout_s: How long the ranks wait for each other in one phase.

    Raises:
        CheckpointError: There are several ranks that can't talk to each other.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.rank, self.world_size = 0, 1
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            msg = (
                f"this is one of WORLD_SIZE={os.environ['WORLD_SIZE']} ranks, but they can't talk to each other: call "
                "air_nb.runtime.init_process_group() or torch.distributed.init_process_group() before the checkpoint "
                "manager saves or restores"
            )
            raise CheckpointError(msg)
        if self.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which does what only one may do."""
        return self.rank == 0

    def agree(self, phase: str, action: Callable[[], _T]) -> list[_T]:
        """Do something on every rank. Collective: every rank calls.

        Args:
            phase: What it is, for messages.
            action: What to do; what it returns must pickle.

        Returns:
            What it returned, index = rank.

        Raises:
            CheckpointError: It failed on some rank, or a rank did not come.
        """
        mine, error = self._attempt(action)
        outcomes = [mine]
        if self._group is not None:
            outcomes = [mine] * self.world_size
            self._meet(phase, lambda: dist.all_gather_object(outcomes, mine, group=self._group))
        return self._values(phase, outcomes, error)

    def broadcast(self, phase: str, action: Callable[[], _T]) -> _T:
        """Do something on rank 0, and have what it returned on all. Collective: every rank calls.

        Raises:
            CheckpointError: It failed, or a rank did not come.
        """
        mine: _Outcome[_T] = _Outcome(None)
        error: Exception | None = None
        if self.is_first:
            mine, error = self._attempt(action)
        outcomes = [mine]
        if self._group is not None:
            self._meet(phase, lambda: dist.broadcast_object_list(outcomes, src=0, group=self._group))
        return self._values(phase, outcomes, error)[0]

    def gather(self, phase: str, action: Callable[[], _T]) -> list[_T]:
        """Do something on every rank, and have what they returned on rank 0. Collective: every rank calls.

        For what is large: the other ranks get an empty list.

        Raises:
            CheckpointError: It failed on some rank, or a rank did not come.
        """
        mine, error = self._attempt(action)
        if self._group is None:
            return self._values(phase, [mine], error)
        gathered = [mine] * self.world_size if self.is_first else None
        self._meet(phase, lambda: dist.gather_object(mine, gathered, dst=0, group=self._group))
        found = [outcome.failure for outcome in gathered or () if outcome.failure]
        self._raise(phase, self.broadcast(phase, lambda: found), error)
        return self._values(phase, gathered or [], error)

    def scatter(self, phase: str, action: Callable[[], Sequence[_T]]) -> _T:
        """Do something on rank 0, and have one part of what it returned on each. Collective: every rank calls.

        Raises:
            CheckpointError: It failed, or a rank did not come.
        """
        parts: Sequence[_T] = ()

        def keep() -> None:
            nonlocal parts
            parts = action()

        self.broadcast(phase, keep)
        if self._group is None:
            return parts[0]
        received: list[Any] = [None]
        given = list(parts) if self.is_first else None
        self._meet(phase, lambda: dist.scatter_object_list(received, given, src=0, group=self._group))
        part: _T = received[0]
        return part

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each over all ranks. Collective: every rank calls, at every boundary: it is made to be fast.

        Raises:
            CheckpointError: A rank did not come.
        """
        if self._group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        try:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise self._lost("agree on whether to go on", error) from error
        return [int(value) for value in tensor]

    def close(self) -> None:
        """Drop the group."""
        if self._group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # the job's own has been destroyed and made anew: ours went with it
                dist.destroy_process_group(self._group)
        self._group = None

    def _attempt(self, action: Callable[[], _T]) -> tuple[_Outcome[_T], Exception | None]:
        try:
            return _Outcome(action()), None
        except Exception as error:  # noqa: BLE001 - the border between ranks: it is raised on all of them
            known = type(error) in _KINDS
            kind = _KINDS.index(type(error) if known else CheckpointError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            return _Outcome(None, _Failure(self.rank, socket.gethostname(), kind, text)), error

    def _meet(self, phase: str, exchange: Callable[[], None]) -> None:
        """Wait until all are there, then exchange: of the ranks that are not, a collective alone would not tell."""
        assert self._group is not None
        try:
            dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
            exchange()
        except RuntimeError as error:
            raise self._lost(phase, error) from error

    def _lost(self, phase: str, error: RuntimeError) -> CheckpointError:
        return CheckpointError(
            f"rank {self.rank} ({socket.gethostname()}) could not {phase} together with the others (time limit "
            f"{self._timeout.total_seconds():g} s): {error}. A rank has died, hangs, or does something else"
        )

    def _values(self, phase: str, outcomes: Sequence[_Outcome[_T]], error: Exception | None) -> list[_T]:
        self._raise(phase, [outcome.failure for outcome in outcomes if outcome.failure], error)
        values: list[Any] = [outcome.value for outcome in outcomes]
        return values

    def _raise(self, phase: str, failures: Sequence[_Failure], error: Exception | None) -> None:
        """Raise the same on all ranks; on the one where it happened, from what happened."""
        if not failures:
            return
        kind = _KINDS[min(failure.kind for failure in failures)]
        if len({failure.text for failure in failures}) == 1:
            ranks = ", ".join(str(failure.rank) for failure in failures)
            where = "" if self.world_size == 1 or len(failures) == self.world_size else f" on rank {ranks}"
            where += f" ({failures[0].host})" if where else ""
            text = failures[0].text
        else:
            where = ""
            text = "; ".join(f"rank {failure.rank} ({failure.host}): {failure.text}" for failure in failures)
        raise kind(f"could not {phase}{where}: {text}") from error
