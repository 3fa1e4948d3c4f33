"""How far an epoch has been consumed, in numbers that no grid of ranks and loader workers has a part in. Pure.

With one example per item that is one number. Where items yield any number of examples, ranks drift apart: then it is
what is complete beyond that number, and how many examples of an item that is under way have been consumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

__all__ = ["Position", "Progress", "deal", "merge"]


@dataclass(frozen=True, slots=True)
class Position:
    """What of an epoch has been consumed.

    Attributes:
        epoch: Number of the epoch, from 0.
        position: All positions below are complete.
        done: Complete positions from ``position`` on, as ascending ``(start, stop)``.
        partial: Examples consumed of items that are not complete, by position.
    """

    epoch: int = 0
    position: int = 0
    done: tuple[tuple[int, int], ...] = ()
    partial: Mapping[int, int] = field(default_factory=dict)

    @property
    def at_start(self) -> bool:
        """Whether nothing of the epoch has been consumed."""
        return not (self.position or self.done or self.partial)

    def next_epoch(self) -> Position:
        """The start of the epoch after this one."""
        return Position(self.epoch + 1)

    def clipped(self, items: int) -> Position:
        """What is left of this position if the epoch has so many items."""
        if self.position >= items:
            return self.next_epoch()
        done = tuple((start, min(stop, items)) for start, stop in self.done if start < items)
        return replace(self, done=done, partial={at: count for at, count in self.partial.items() if at < items})

    def remaining(self, items: int, start: int = 0, step: int = 1) -> Iterator[int]:
        """The positions that are not complete, in order: from the start-th of them every step-th.

        Args:
            items: Number of positions in the epoch.
            start: How many to leave out.
            step: Distance between two.
        """
        for first, stop in self._gaps(items):
            length = stop - first
            yield from range(first + start, stop, step)
            # How far into the next gap the walk has come.
            start = start - length if start >= length else (start - length) % step

    def _gaps(self, items: int) -> Iterator[tuple[int, int]]:
        first = self.position
        for start, stop in self.done:
            yield first, start
            first = stop
        yield first, items


@dataclass(slots=True)
class Progress:
    """How far one loader worker has come with its deal, as far as its examples were delivered.

    Attributes:
        start: Which of the remaining positions was its first.
        step: Distance to the next one.
        items: How many of its items are complete.
        examples: How many examples of the one after were delivered.
    """

    start: int
    step: int
    items: int = 0
    examples: int = 0

    def add(self, examples: int, *, ended: bool) -> None:
        """Count examples of the item at hand, and whether that item ended with them."""
        self.examples += examples
        if ended:
            self.items += 1
            self.examples = 0


def deal(rank: int, world_size: int, worker: int, num_workers: int) -> Progress:
    """Deal the remaining positions to one loader worker of one rank: neighbours go to different ranks.

    The number of workers may differ between ranks.
    """
    return Progress(start=rank + world_size * worker, step=world_size * num_workers)


def merge(base: Position, items: int, progress: Sequence[Progress]) -> Position:
    """What has been consumed, from what all workers of all ranks have done since a common position.

    Args:
        base: The position that the work was dealt from.
        items: Number of positions in the epoch.
        progress: One entry for each worker of each rank.
    """
    # Below the slowest worker all is complete, so only what lies beyond has to be listed: seconds into an epoch of
    # millions of items, and at its end, that is as short.
    slowest = min(one.start + one.items * one.step for one in progress)
    done: list[int] = []
    partial = dict(base.partial)
    for one in progress:
        behind = max(0, -(-(slowest - one.start) // one.step))
        mine = base.remaining(items, one.start + behind * one.step, one.step)
        done += islice(mine, one.items - behind)
        if one.examples:
            current = next(mine)
            partial[current] = partial.get(current, 0) + one.examples
    return _normal(base, next(base.remaining(items, slowest), items), done, partial)


def _normal(base: Position, prefix: int, done: Sequence[int], partial: Mapping[int, int]) -> Position:
    """Join what touches, and forget the examples of what is complete."""
    spans = sorted([(0, prefix), *base.done, *((position, position + 1) for position in done)])
    joined = [spans[0]]
    for start, stop in spans[1:]:
        if start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    complete = {position for position in partial if any(start <= position < stop for start, stop in joined)}
    left = {position: partial[position] for position in sorted(partial.keys() - complete)}
    return replace(base, position=joined[0][1], done=tuple(joined[1:]), partial=left)
