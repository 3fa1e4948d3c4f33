"""Who takes which positions of an epoch at which step. Pure.

The positions of an epoch are dealt in order: a step takes the next ``world_size * batch_size`` of them, each rank a
run of its own. A position is all that has to be known to go on, whoever got there and on however many ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Rows", "Split", "Tail"]


class Tail(StrEnum):
    """What happens to the rows of an epoch that make no full batch on all ranks; all have equally many steps always."""

    EXACT = "exact"
    """They are spread evenly, in smaller batches; a rank that would have none repeats one, marked invalid."""
    PAD = "pad"
    """Batches are filled with rows from the epoch's start, marked invalid: all batches have the same size."""
    DROP = "drop"
    """They are left out."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one rank at one step.

    Attributes:
        positions: The positions that this rank takes.
        fillers: Positions whose items only fill the batch: they belong to others and are marked invalid.
    """

    positions: range
    fillers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """How an epoch is dealt to the ranks.

    Attributes:
        items: Number of positions in the epoch.
        batch_size: Rows of each rank's batch.
        rank: This rank.
        world_size: Number of ranks.
        tail: What happens to the rest.
    """

    items: int
    batch_size: int
    rank: int
    world_size: int
    tail: Tail

    @property
    def step_size(self) -> int:
        """Positions that all ranks together take at a step."""
        return self.batch_size * self.world_size

    def steps(self, position: int) -> int:
        """Number of steps from a position to the end of the epoch."""
        left = max(0, self.items - position)
        return left // self.step_size if self.tail is Tail.DROP else -(-left // self.step_size)

    def after(self, position: int) -> int:
        """The position after the step that begins at this one; ``items`` at the end of the epoch."""
        following = min(position + self.step_size, self.items)
        return following if self.steps(following) else self.items

    def rows(self, position: int) -> Rows:
        """What this rank takes at the step that begins at a position."""
        at_hand = min(self.step_size, self.items - position)
        share, rest = divmod(at_hand, self.world_size)
        start = position + self.rank * share + min(self.rank, rest)
        mine = range(start, start + share + (self.rank < rest))
        if self.tail is Tail.PAD:
            missing = self.batch_size - len(mine)
            # A run of its own for each rank, so that no two of them repeat the same rows where there are enough.
            first = self.rank * self.batch_size
            return Rows(mine, tuple((first + number) % self.items for number in range(missing)))
        if not mine:
            return Rows(mine, (position + self.rank % at_hand,))
        return Rows(mine, ())
