"""The arguments of ``DataLoader``, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import IterableDataset

from air_nb.data.dataset import Files
from air_nb.data.items import OnError
from air_nb.data.partition import Tail
from air_nb.data.state import OnChange
from air_nb.data.stream import Checkpointable

if TYPE_CHECKING:
    import torch

__all__ = [
    "Kind",
    "Settings",
    "check_numbers",
    "chosen_seed",
    "chosen_shuffle",
    "chosen_tail",
    "kind_of",
    "one_of",
    "refuse_samplers",
]

_Choice = TypeVar("_Choice", bound=StrEnum)


class Kind(StrEnum):
    """How many examples an item of the data set has."""

    STRICT = "strict"
    """One."""
    STREAM = "stream"
    """Any number: the data set is ``Checkpointable``."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a loader was asked to do.

    Attributes:
        kind: How many examples an item has.
        batch_size: Rows of a rank's batch.
        single: A batch is one row, without a batch dimension (``batch_size=None``).
        shuffle: Whether the order is shuffled.
        seed: Seed of the order and of the examples' random numbers.
        tail: What happens to the rest that makes no full batch on all ranks.
        on_error: What an item that can't be read leads to.
        on_change: What a changed data set leads to.
        seed_examples: Whether random numbers are seeded for each example.
        asked_num_workers: As given.
        num_workers: Number of loader workers.
    """

    kind: Kind
    batch_size: int
    single: bool
    shuffle: bool
    seed: int
    tail: Tail
    on_error: OnError
    on_change: OnChange
    seed_examples: bool
    asked_num_workers: int | None
    num_workers: int


def kind_of(dataset: Any) -> Kind:
    """Find out how to read a data set.

    Raises:
        TypeError: It can't be gone on with after a restart.
    """
    name = type(dataset).__name__
    if not hasattr(dataset, "__len__"):
        msg = f"{name} has no length. {_ADVICE}"
        raise TypeError(msg)
    if isinstance(dataset, Checkpointable):
        return Kind.STREAM
    if isinstance(dataset, Files) or (hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)):
        return Kind.STRICT
    msg = f"{name} can only be read from its start: nobody could go on in the middle. {_ADVICE}"
    raise TypeError(msg)


_ADVICE = (
    "Give it __len__ (number of work items) and either __getitem__(index), or, if an item has any number of examples, "
    "examples(index, start=0) as in air_nb.data.Checkpointable; torch's own DataLoader takes it as it is"
)


def one_of(choices: type[_Choice], name: str, value: str) -> _Choice:
    """Read a choice.

    Raises:
        ValueError: There is no such choice.
    """
    try:
        return choices(value)
    except ValueError:
        msg = f"{name}={value!r}: one of {', '.join(repr(str(choice)) for choice in choices)}"
        raise ValueError(msg) from None


def chosen_tail(tail: str, *, drop_last: bool) -> Tail:
    """``drop_last`` is torch's name for ``tail="drop"``.

    Raises:
        ValueError: There is no such tail, or the two contradict each other.
    """
    chosen = one_of(Tail, "tail", tail)
    if drop_last and chosen is Tail.PAD:
        msg = "drop_last=True and tail='pad' contradict each other: give one of them"
        raise ValueError(msg)
    return Tail.DROP if drop_last else chosen


def chosen_seed(seed: int | None, generator: torch.Generator | None, dataset: Any) -> int:
    """The seed given, that of the generator given, the data set's own, or 0.

    Raises:
        ValueError: Two are given.
    """
    if generator is not None:
        if seed is not None:
            msg = f"seed={seed} and a generator: the order has one seed, give one of them"
            raise ValueError(msg)
        return generator.initial_seed()
    if seed is not None:
        return seed
    own = getattr(dataset, "seed", None)
    return own if isinstance(own, int) else 0


def chosen_shuffle(shuffle: bool | None, dataset: Any) -> bool:  # noqa: FBT001  # torch's own positional argument
    """What is given, else what the data set itself says, else no."""
    own = getattr(dataset, "shuffle", None)  # a method in other libraries
    return bool(own is True if shuffle is None else shuffle)


def refuse_samplers(sampler: Any, batch_sampler: Any, *, in_order: bool) -> None:
    """Refuse what would make another order than the one that is gone on with after a restart.

    Raises:
        ValueError: One of them is given.
    """
    given = sampler if sampler is not None else batch_sampler
    if given is not None:
        msg = (
            f"{type(given).__name__}: this loader has an order of its own and splits it over the ranks itself. Leave "
            "the sampler out, and use shuffle=True or False; a choice of items is torch.utils.data.Subset"
        )
        raise ValueError(msg)
    if not in_order:
        msg = "in_order=False: the position in an epoch needs batches in order; leave it out"
        raise ValueError(msg)


def check_numbers(batch_size: int | None, num_workers: int | None, ranks: tuple[int | None, int | None]) -> None:
    """Refuse numbers that mean nothing.

    Raises:
        ValueError: One of them is out of range, or ``rank`` comes without ``world_size``.
    """
    if batch_size is not None and batch_size < 1:
        msg = f"batch_size={batch_size}: at least 1, or None for single examples"
        raise ValueError(msg)
    if num_workers is not None and num_workers < 0:
        msg = f"num_workers={num_workers}: 0 reads in the main process, None chooses"
        raise ValueError(msg)
    rank, world_size = ranks
    if (rank is None) != (world_size is None):
        msg = f"rank={rank}, world_size={world_size}: give both, or neither"
        raise ValueError(msg)
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        msg = f"rank={rank}, world_size={world_size}: ranks count from 0 to world_size - 1"
        raise ValueError(msg)
