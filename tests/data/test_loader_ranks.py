"""``DataLoader`` on several ranks: they mean the same or all say so, and they share an epoch in one order."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from air_nb.data import DataLoader
from air_nb.data.agree import require_equal
from air_nb.errors import DataError
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("forkserver")


class Numbers:
    def __init__(self, items: int) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> int:
        return index


class Documents:
    def __init__(self, counts: list[int], bad: int | None = None) -> None:
        self.counts = counts
        self.bad = bad

    def __len__(self) -> int:
        return len(self.counts)

    def examples(self, index: int, start: int = 0) -> Iterator[tuple[int, int]]:
        if index == self.bad:
            msg = "cut off"
            raise OSError(msg)
        return ((index, number) for number in range(start, self.counts[index]))


# ------------------------------------------------------------------------------------------------------------ agreeing


def _disagree(what: str) -> str:
    odd = dist.get_rank() == 2
    arguments: dict[str, Any] = {"batch_size": 2, "num_workers": 0}
    items = 12
    state = None
    match what:
        case "num_workers":
            arguments["num_workers"] = 1 if odd else 0
        case "batch_size":
            arguments["batch_size"] = 3 if odd else 2
        case "seed" | "shuffle":
            arguments |= {"shuffle": not odd if what == "shuffle" else True, "seed": 7 if odd and what == "seed" else 0}
        case "items":
            items = 0 if odd else 12
        case "position":
            state = {"position": 4} if odd else {}
    loader = DataLoader(Numbers(items), **arguments)
    if state is not None:
        loader.load_state_dict({**loader.state_dict(), **state})
    try:
        iter(loader)
    except DataError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "what, says",
    [
        ("num_workers", "num_workers: 0 on ranks 0-1, 1 on rank 2"),
        ("batch_size", "batch_size: 2 on ranks 0-1, 3 on rank 2"),
        ("seed", "seed: 0 on ranks 0-1, 7 on rank 2"),
        ("shuffle", "shuffle: True on ranks 0-1, False on rank 2"),
        ("items", "items: 12 on ranks 0-1, 0 on rank 2"),
        ("position", "position: 0 on ranks 0-1, 4 on rank 2"),
    ],
)
def test_ranks_that_do_not_mean_the_same_all_say_what_differs(what, says):
    errors = run_ranks(3, _disagree, what)
    assert len(set(errors)) == 1
    assert says in errors[0]


def test_many_ranks_are_listed_in_short():
    facts = [{"seed": 3 if rank in {2, 5, 6} else 1} for rank in range(9)]
    with pytest.raises(DataError, match=r"seed: 1 on ranks 0-1,3-4,7-8, 3 on ranks 2,5-6\. Do it"):
        require_equal("x", facts, "Do it")


def _one_rank_evaluates() -> list[int]:
    if dist.get_rank() == 0:
        loader = DataLoader(Numbers(5), 2, num_workers=0, rank=0, world_size=1)
        assert len(loader) == 3
        return [int(item) for batch in loader for item in batch]
    return []


def test_a_loader_that_only_one_rank_uses_asks_nobody():
    assert run_ranks(2, _one_rank_evaluates) == [[0, 1, 2, 3, 4], []]


def _length_on_one_rank() -> int:
    return len(DataLoader(Numbers(9), 2, num_workers=0)) if dist.get_rank() == 1 else 3


def test_asking_one_rank_for_the_length_is_no_collective():
    assert run_ranks(2, _length_on_one_rank) == [3, 3]


def _data_parallel_groups() -> list[int]:
    """Ranks 0 and 2, and 1 and 3, share the data: two ranks of a model each see the same."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    loader = DataLoader(Numbers(6), 1, shuffle=True, num_workers=0, process_group=groups[dist.get_rank() % 2])
    return [int(item) for batch in loader for item in batch]


def test_a_process_group_tells_which_ranks_share_the_data():
    zero, one, two, three = run_ranks(4, _data_parallel_groups)
    assert zero == one
    assert two == three
    assert sorted(zero + two) == list(range(6))


def test_without_a_process_group_the_environment_says_who_one_is(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert [int(item) for batch in DataLoader(Numbers(6), 1, num_workers=0) for item in batch] == [1, 3, 5]
    with pytest.raises(DataError, match=r"rank 1 of 2 can't talk.*Initialise torch\.distributed"):
        iter(DataLoader(Documents([1]), num_workers=0))


# --------------------------------------------------------------------------------------------------------------- order


def _train(batch_size: int, num_workers: int, state: Any, steps: int) -> tuple[list[list[int]], list[float], Any]:
    """A float64 training whose gradient is that of the global batch: samples by step, losses, and the state."""
    loader = DataLoader(Numbers(40), batch_size, shuffle=True, seed=2, num_workers=num_workers)
    weight = torch.zeros((), dtype=torch.float64)
    samples: list[list[int]] = []
    losses = []
    if state is not None:
        loader.load_state_dict(state["data"])
        weight = torch.tensor(state["weight"], dtype=torch.float64)
    for step, batch in enumerate(loader):
        mine = batch[loader.valid].tolist()
        shares: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(shares, mine)
        together = [item for share in shares for item in share]
        target = torch.tensor(together, dtype=torch.float64)
        losses.append(float(((weight - target) ** 2).mean()))
        weight = weight - 0.1 * 2 * (weight - target).mean()
        samples.append(together)
        if step == steps - 1:
            break
    return samples, losses, {"data": loader.state_dict(), "weight": float(weight)}


@pytest.mark.parametrize(
    "world_size, batch_size, num_workers", [(2, 6, 0), (3, 4, 2), pytest.param(4, 3, 1, marks=pytest.mark.slow)]
)
def test_the_order_of_samples_and_the_losses_are_those_of_one_rank(world_size, batch_size, num_workers):
    def digest(samples: list[list[int]]) -> str:
        return hashlib.sha256(repr(samples).encode()).hexdigest()

    samples, losses, _ = run_ranks(1, _train, 12, 0, None, 99)[0]
    grid = run_ranks(world_size, _train, batch_size, num_workers, None, 99)
    assert {digest(one[0]) for one in grid} == {digest(samples)}
    assert grid[0][1] == losses
    interrupted = run_ranks(world_size, _train, batch_size, num_workers, None, 2)[0]
    resumed = run_ranks(2, _train, 6, 0, interrupted[2], 99)[0]
    assert interrupted[0] + resumed[0] == samples
    assert interrupted[1] + resumed[1] == losses


# -------------------------------------------------------------------------------------- any number of examples per item


def _stream(counts: list[int], tail: str, num_workers: int) -> tuple[list[tuple[int, int]], int, list[Any]]:
    loader = DataLoader(Documents(counts), 3, tail=tail, shuffle=True, num_workers=num_workers)
    seen: list[tuple[int, int]] = []
    steps = 0
    states = []
    for items, numbers in loader:
        steps += 1
        rows = zip(items[loader.valid].tolist(), numbers[loader.valid].tolist(), strict=True)
        seen += list(rows)
        states.append(loader.state_dict())
        if tail != "exact":
            assert len(items) == 3
    return seen, steps, states


@pytest.mark.parametrize("tail", ["exact", "pad", "drop"])
@pytest.mark.parametrize("counts", [[3, 0, 9, 1, 0, 2, 7, 7, 8], [5]], ids=["many", "fewer items than ranks"])
def test_ranks_of_a_stream_take_equally_many_steps_and_agree_on_the_state(tail, counts):
    results = run_ranks(3, _stream, counts, tail, 1)
    seen = [pair for result in results for pair in result[0]]
    assert len({result[1] for result in results}) == 1
    assert all(result[2] == results[0][2] for result in results)
    everything = [(item, number) for item, count in enumerate(counts) for number in range(count)]
    assert len(seen) == len(set(seen))
    assert sorted(seen) == everything if tail != "drop" else set(seen) <= set(everything)
    if results[0][2]:
        assert results[0][2][-1]["epoch"] == 1


def _bad_stream() -> str:
    loader = DataLoader(Documents([4] * 6, bad=1), 2, num_workers=0)
    try:
        list(loader)
    except DataError as error:
        return str(error)
    return "no error"


def test_an_unreadable_item_of_one_rank_ends_the_pass_on_all():
    errors = run_ranks(2, _bad_stream)
    assert "another rank could not read" in errors[0]
    assert "item 1: OSError: cut off" in errors[1]


def _skipping() -> list[list[Any]]:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index in {1, 6}:
                msg = "bad"
                raise OSError(msg)
            return index

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(Broken(8), 2, num_workers=0, on_error="skip")
        list(loader)
    return [[item, reason] for item, reason in loader.state_dict()["skipped"]]


def test_all_ranks_know_what_any_of_them_skipped():
    first, second = run_ranks(2, _skipping)
    assert first == second == [[1, "item 1: OSError: bad"], [6, "item 6: OSError: bad"]]
