"""Who the ranks are, and whether they mean the same: over a gloo group of our own, which an NCCL-only job has none of.

Everything here but ``LoneRanks`` is collective: every rank calls it, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from air_nb.errors import DataError

__all__ = ["GlooRanks", "LoneRanks", "Ranks", "find_ranks", "require_equal"]


class Ranks(Protocol):
    """The ranks that share a data set."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def can_talk(self) -> bool:
        """Whether the two methods below work."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, index = rank. Collective: every rank calls."""

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each over all ranks. Collective: every rank calls."""


class LoneRanks:
    """Ranks that can't talk to each other, or one alone."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.can_talk = world_size == 1

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value: this one's only."""
        assert self.can_talk
        return [value]

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each: this one's."""
        assert self.can_talk
        return list(values)


class GlooRanks:
    """The members of a process group, who talk over a gloo group that is made when they first do."""

    can_talk = True

    def __init__(self, members_of: dist.ProcessGroup, *, is_default: bool) -> None:
        self._members_of = members_of
        self._is_default = is_default
        self.rank = dist.get_rank(members_of)
        self.world_size = dist.get_world_size(members_of)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, index = rank. Collective: every rank calls."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self._group())
        return gathered

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each over all ranks. Collective: every rank calls."""
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group())
        return [int(value) for value in tensor]

    def _group(self) -> dist.ProcessGroup:
        if self._members_of not in _gloo_groups:
            ranks = dist.get_process_group_ranks(self._members_of)
            # Only its members know of a group of the user's, so only they can be asked to make ours.
            ours = dist.new_group(ranks, backend="gloo", use_local_synchronization=not self._is_default)
            _gloo_groups[self._members_of] = ours
        return _gloo_groups[self._members_of]


# A gloo group for each group of the user's: groups are sockets between all ranks, and loaders are made by the dozen.
_gloo_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def find_ranks(group: dist.ProcessGroup | None, rank: int | None, world_size: int | None) -> Ranks:
    """Find out who shares the data set.

    Args:
        group: Process group of the ranks that do; None: all ranks of the job.
        rank: This rank, given together with ``world_size``: then nobody is asked.
        world_size: Number of ranks.
    """
    if rank is not None and world_size is not None:
        return LoneRanks(rank, world_size)
    if not (dist.is_available() and dist.is_initialized()):
        return LoneRanks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    shared = group if group is not None else dist.group.WORLD
    assert shared is not None
    if dist.get_world_size(shared) == 1:
        return LoneRanks(0, 1)
    return GlooRanks(shared, is_default=group is None)


def require_equal(what: str, facts: Sequence[Mapping[str, Any]], advice: str) -> None:
    """Refuse facts that are not the same on all ranks. All ranks have all facts, so all of them raise.

    Args:
        what: What disagrees, for the message.
        facts: Names and values, index = rank.
        advice: What to do about it.

    Raises:
        DataError: It names what differs, and on which ranks.
    """
    differing = [name for name in facts[0] if any(other[name] != facts[0][name] for other in facts)]
    if differing:
        listed = "; ".join(f"{name}: {_by_value([fact[name] for fact in facts])}" for name in differing)
        msg = f"the ranks disagree about {what}: {listed}. {advice}"
        raise DataError(msg)


def _by_value(values: Sequence[Any]) -> str:
    """``2 on ranks 0-2, 4 on rank 3``."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(repr(value), []).append(rank)
    return ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in groups.items())


def _ranks(ranks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
