"""``DataLoader`` on one rank: torch's manners, and a position that can be gone on with at any moment."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, RandomSampler, Subset, TensorDataset

from air_nb.data import Checkpointable, DataLoader
from air_nb.errors import DataError, ManifestChangedError

pytestmark = pytest.mark.usefixtures("forkserver")

START_METHODS = [
    pytest.param({"num_workers": 0}, id="main"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "fork"}, id="fork"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "forkserver"}, id="forkserver"),
    pytest.param(
        {"num_workers": 2, "multiprocessing_context": "forkserver", "persistent_workers": True}, id="persistent"
    ),
    pytest.param({"num_workers": 1, "multiprocessing_context": "spawn"}, id="spawn", marks=pytest.mark.slow),
]


class Numbers:
    """Item i is the number i."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Numbers):
    """Item i comes with what each library draws."""

    def __getitem__(self, index: int) -> Any:
        numpys = float(np.random.rand())  # noqa: NPY002
        return torch.tensor([index, random.random(), numpys, float(torch.rand(()))], dtype=torch.float64)


class Documents:
    """Item i has so many examples, each of which is (item, number of the example)."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __len__(self) -> int:
        return len(self.counts)

    def examples(self, index: int, start: int = 0) -> Iterator[tuple[int, int]]:
        yield from ((index, number) for number in range(start, self.counts[index]))


class Broken(Numbers):
    """Some items can't be read."""

    def __init__(self, items: int, bad: set[int]) -> None:
        super().__init__(items)
        self.bad = bad

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            msg = "cut off in the middle"
            raise OSError(msg)
        return index


def _items(batches: Any) -> list[int]:
    return [int(item) for batch in batches for item in batch]


def _pairs(batches: Any) -> list[tuple[int, int]]:
    return [(int(item), int(number)) for batch in batches for item, number in zip(*batch, strict=True)]


# ------------------------------------------------------------------------------------------------ as torch's DataLoader


@pytest.mark.parametrize("how", START_METHODS)
@pytest.mark.parametrize("batch_size", [4, None])
def test_without_shuffle_it_yields_what_torch_yields(how, batch_size):
    dataset = TensorDataset(torch.arange(10), torch.arange(10.0))
    ours = list(DataLoader(dataset, batch_size, **how))
    torchs = list(TorchDataLoader(dataset, batch_size))
    assert len(ours) == len(torchs) == len(DataLoader(dataset, batch_size, num_workers=0))
    for our, their in zip(ours, torchs, strict=True):
        assert type(our) is type(their)
        assert all(torch.equal(a, b) for a, b in zip(our, their, strict=True))


def test_batches_are_made_by_the_users_collate_fn():
    assert list(DataLoader(Numbers(5), 2, num_workers=0, collate_fn=tuple)) == [(0, 1), (2, 3), (4,)]


def test_worker_init_fn_is_called_in_each_worker(tmp_path):
    def init(worker: int) -> None:
        (tmp_path / str(worker)).touch()

    list(DataLoader(Numbers(8), 1, num_workers=2, multiprocessing_context="fork", worker_init_fn=init))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_timeout_without_workers_is_refused_as_in_torch():
    with pytest.raises(AssertionError, match="timeout"):
        iter(DataLoader([1, 2, 3], num_workers=0, timeout=1))


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")  # where there is nothing to pin memory for
@pytest.mark.parametrize("workers", [0, 1])
def test_pinning_is_torchs_with_and_without_workers(workers):
    loader = DataLoader([1, 2, 3], 2, num_workers=workers, pin_memory=True)
    batches = list(loader)
    assert [batch.tolist() for batch in batches] == [[1, 2], [3]]
    assert all(batch.is_pinned() is torch.accelerator.is_available() for batch in batches)
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_iteration_of_the_users_does_not_end_the_epoch_unnoticed(workers):
    def collate(rows: list[int]) -> int:
        return next(iter(row for row in rows if row != 2))

    loader = DataLoader(Numbers(4), 1, num_workers=workers, collate_fn=collate)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(RuntimeError, match="collate_fn raised StopIteration"):
        next(batches)
    assert loader.state_dict()["position"] == 2


class _Pairs(Numbers):
    """Item i yields two examples."""

    def examples(self, index: int, start: int = 0) -> Iterator[int]:
        return iter([2 * index, 2 * index + 1][start:])


def test_nor_does_it_where_items_yield_any_number_of_examples():
    def collate(rows: list[int]) -> list[int]:
        return rows if 0 in rows else next(iter([]))

    batches = iter(DataLoader(_Pairs(4), 4, num_workers=0, collate_fn=collate))
    assert next(batches) == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="collate_fn raised StopIteration"):
        next(batches)


def test_a_loader_may_be_used_by_a_data_set_in_a_loader_worker():
    class Outer(Numbers):
        def __getitem__(self, index: int) -> Any:
            return [example for batch in DataLoader(_Pairs(3), 2, num_workers=0) for example in batch.tolist()]

    loader = DataLoader(Outer(4), 1, num_workers=2, multiprocessing_context="fork", collate_fn=list)
    assert list(loader) == [[[0, 1, 2, 3, 4, 5]]] * 4


def test_a_refused_argument_leaves_nothing_behind_that_complains():
    with pytest.raises(ValueError, match="prefetch_factor"):
        DataLoader(Numbers(2), num_workers=0, prefetch_factor=2)
    gc.collect()


def test_a_slow_item_runs_into_the_timeout_as_in_torch():
    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(2)
            return index

    loader = DataLoader(Slow(2), 1, num_workers=1, timeout=0.2, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds"):
        list(loader)


def test_drop_last_leaves_out_the_rest():
    loader = DataLoader(Numbers(10), 4, num_workers=0, drop_last=True)
    assert _items(loader) == list(range(8))
    assert loader.epoch == 1
    assert len(loader) == 2


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"tail": "cut"}, "'exact', 'pad', 'drop'"),
        ({"on_error": "ignore"}, "'raise', 'skip', 'retry'"),
        ({"on_change": "what"}, "'error', 'append', 'ignore'"),
        ({"drop_last": True, "tail": "pad"}, "contradict"),
        ({"seed": 1, "generator": torch.Generator()}, "give one of them"),
        ({"sampler": RandomSampler(range(3))}, "RandomSampler"),
        ({"batch_sampler": [[0]]}, "order of its own"),
        ({"in_order": False}, "in_order"),
        ({"rank": 1}, "give both"),
        ({"rank": 2, "world_size": 2}, "ranks count from 0"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        DataLoader(Numbers(3), **arguments)


def test_a_data_set_that_can_only_be_read_from_its_start_is_refused_with_a_way_out():
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    class Sized(Stream):
        def __len__(self) -> int:
            return 3

    for dataset in (Stream(), Sized(), iter([1])):
        with pytest.raises(TypeError, match=r"air_nb\.data\.Checkpointable"):
            DataLoader(dataset)


def test_an_empty_data_set_is_an_error_and_not_an_endless_training():
    with pytest.raises(DataError, match="empty"):
        iter(DataLoader(Numbers(0), num_workers=0))


def test_a_batch_larger_than_the_data_set_with_drop_last_is_an_error():
    with pytest.raises(ValueError, match=r"3 items are fewer than the 4 of one step"):
        iter(DataLoader(Numbers(3), 4, num_workers=0, drop_last=True))


def test_the_generator_gives_the_seed():
    generator = torch.Generator().manual_seed(11)
    with_generator = _items(DataLoader(Numbers(50), shuffle=True, num_workers=0, generator=generator))
    assert with_generator == _items(DataLoader(Numbers(50), shuffle=True, num_workers=0, seed=11))


def test_a_plain_list_is_read_without_workers_unless_they_are_asked_for():
    assert DataLoader([1, 2, 3]).num_workers == 0
    assert DataLoader([1, 2, 3], num_workers=1).num_workers == 1
    # What is meant for workers is no mistake where we chose to have none.
    assert _items(DataLoader([1, 2, 3], prefetch_factor=2, persistent_workers=True)) == [1, 2, 3]


# --------------------------------------------------------------------------------------------------------------- tails


def test_padded_batches_are_full_and_valid_tells_which_rows_count():
    loader = DataLoader(Numbers(5), 3, num_workers=0, tail="pad")
    assert [(batch.tolist(), loader.valid.tolist()) for batch in loader] == [
        ([0, 1, 2], [True, True, True]),
        ([3, 4, 0], [True, True, False]),
    ]
    assert loader.valid.dtype is torch.bool


@pytest.mark.parametrize("tail", ["exact", "pad", "drop"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("items", [1, 2, 7, 30])
def test_all_ranks_take_equally_many_steps_and_count_each_item_once(items, world_size, tail):
    loaders = [
        DataLoader(Numbers(items), 2, tail=tail, shuffle=True, num_workers=0, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    if tail == "drop" and items < 2 * world_size:
        with pytest.raises(ValueError, match="leaves no batch"):
            iter(loaders[0])
        return
    steps = []
    counted: list[int] = []
    for loader in loaders:
        batches = 0
        for batch in loader:
            batches += 1
            assert len(batch) == len(loader.valid) >= 1
            counted += batch[loader.valid].tolist()
        steps.append(batches)
    assert steps == [len(loaders[0])] * world_size
    assert (
        len(set(counted)) == len(counted) == (items // (2 * world_size) * 2 * world_size if tail == "drop" else items)
    )


# -------------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("how", START_METHODS)
@pytest.mark.parametrize("stop", [0, 2, 5])
def test_what_was_delivered_and_what_comes_after_a_restore_are_the_epoch(how, stop):
    whole = _items(DataLoader(Numbers(15), 3, shuffle=True, seed=5, num_workers=0))
    first = DataLoader(Numbers(15), 3, shuffle=True, seed=5, **how)
    batches = iter(first)
    delivered = _items(next(batches) for _ in range(stop))
    state = json.loads(json.dumps(first.state_dict()))
    del batches
    second = DataLoader(Numbers(15), 4, shuffle=True, seed=5, num_workers=0)
    for resumed in (first, second):
        resumed.load_state_dict(state)
        rest = _items(resumed)
        assert delivered + rest == whole or stop == 5
    if stop < 5:
        assert second.epoch == 1
    else:  # the end of an epoch is the start of the next one
        assert state["epoch"] == 1
        assert sorted(rest) == sorted(whole) != rest


@pytest.mark.parametrize("moment", ["before", "iter", "middle", "last", "after"])
def test_loading_a_state_and_asking_for_it_gives_the_same_one(moment):
    first = DataLoader(Numbers(10), 4, shuffle=True, num_workers=0)
    if moment != "before":
        batches = iter(first)
        for _ in range({"iter": 0, "middle": 2, "last": 3, "after": 4}[moment]):
            next(batches, None)
    state = first.state_dict()
    second = DataLoader(Numbers(10), 4, shuffle=True, num_workers=0)
    iter(second)
    second.load_state_dict(state)
    assert second.state_dict() == state
    iter(second)
    assert second.state_dict() == state


def test_a_second_and_a_third_restore_within_one_epoch():
    whole = _items(DataLoader(Numbers(23), 2, shuffle=True, num_workers=0))
    seen: list[int] = []
    state = None
    for batch_size, steps, workers in ((2, 3, 0), (3, 2, 2), (5, 1, 1), (1, 99, 0)):
        loader = DataLoader(Numbers(23), batch_size, shuffle=True, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        for _, batch in zip(range(steps), batches, strict=False):
            seen += batch.tolist()
            state = loader.state_dict()
        del batches
    assert seen == whole


def test_the_pass_after_the_restored_one_is_over_the_whole_next_epoch():
    straight = DataLoader(Numbers(10), 2, shuffle=True, num_workers=0)
    epochs = [_items(straight) for _ in range(3)]
    batches = iter(straight)
    assert straight.epoch == 3
    next(batches)
    again = DataLoader(Numbers(10), 2, shuffle=True, num_workers=0)
    again.load_state_dict({**again.state_dict(), "epoch": 1, "position": 4})
    assert again.epoch == 1
    assert _items(again) == epochs[1][4:]
    assert _items(again) == epochs[2]
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_pass_that_is_left_early_is_followed_by_the_next_epoch_as_in_torch():
    loader = DataLoader(Numbers(10), 2, shuffle=True, num_workers=0)
    whole = [_items(loader) for _ in range(3)]
    loader = DataLoader(Numbers(10), 2, shuffle=True, num_workers=0)
    first = _items([next(iter(loader))])
    assert _items(loader) == whole[1]
    for batch in loader:
        assert loader.epoch == 2
        first = batch.tolist()
        break
    loader.load_state_dict(loader.state_dict())  # the documented way to go on with it
    assert first + _items(loader) == whole[2]


def test_an_iterator_that_gave_nothing_uses_up_no_epoch():
    loader = DataLoader(Numbers(10), 2, shuffle=True, num_workers=0)
    iter(loader)
    iter(loader)
    assert _items(loader) == _items(DataLoader(Numbers(10), 2, shuffle=True, num_workers=0))


def test_an_older_iterator_says_why_it_has_ended():
    loader = DataLoader(Numbers(10), 2, num_workers=0)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(RuntimeError, match="only the newest one goes on"):
        next(first)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="make a new one"):
        next(second)


def test_set_epoch_of_trainers_that_call_it_before_each_pass_changes_nothing_after_a_restore():
    loader = DataLoader(Numbers(10), 2, shuffle=True, num_workers=0)
    whole = [_items(loader) for _ in range(3)]
    loader = DataLoader(Numbers(10), 2, shuffle=True, num_workers=0)
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 4})
    seen = []
    for epoch in range(1, 3):
        loader.set_epoch(epoch)
        seen.append(_items(loader))
    assert seen == [whole[1][4:], whole[2]]
    loader.set_epoch(0)
    assert _items(loader) == whole[0]


def test_ten_million_items_in_the_middle_of_an_epoch_are_found_at_once():
    read: list[int] = []

    class Counted(Numbers):
        def __getitem__(self, index: int) -> int:
            read.append(index)
            return index

    loader = DataLoader(Counted(20_000_000), 8, shuffle=True, num_workers=0)
    loader.load_state_dict({**loader.state_dict(), "position": 10_000_000})
    assert next(iter(loader)).tolist() == read
    assert len(read) == 8


@pytest.mark.parametrize(
    "change, says",
    [
        ({"seed": 1}, r"seed=1, this loader has seed=0"),
        ({"shuffle": False}, r"shuffle=False"),
        ({"kind": "stream"}, r"'stream' data set"),
        ({"version": 99}, r"format version 99.*newer"),
        ({"items": 11}, r"11 items then, 10 now"),
        ({"manifest": "0" * 64}, r"other names, sizes or dates"),
        ({"position": "three"}, r"no state of an air_nb DataLoader"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(change, says):
    loader = DataLoader(Numbers(10), 2, shuffle=True, num_workers=0)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(DataError, match=says):
        loader.load_state_dict({**state, **change})
    assert loader.state_dict() == state


def test_a_state_that_is_not_ours_is_refused():
    with pytest.raises(DataError, match=r"KeyError: 'version'"):
        DataLoader(Numbers(3), num_workers=0).load_state_dict({"_index_sampler_state": None})


def test_items_that_were_appended_wait_for_the_next_epoch():
    first = DataLoader(Numbers(10), 4, shuffle=True, num_workers=0)
    batches = iter(first)
    seen = next(batches).tolist()
    state = first.state_dict()
    with pytest.raises(ManifestChangedError, match="on_change='append'"):
        DataLoader(Numbers(13), 4, shuffle=True, num_workers=0).load_state_dict(state)
    grown = DataLoader(Numbers(13), 2, shuffle=True, num_workers=0, on_change="append")
    grown.load_state_dict(state)
    assert grown.state_dict() == state
    batches = iter(grown)
    seen += next(batches).tolist()
    again = DataLoader(Numbers(13), 3, shuffle=True, num_workers=0, on_change="append")
    again.load_state_dict(grown.state_dict())
    assert sorted(seen + _items(again)) == list(range(10))
    assert sorted(_items(again)) == list(range(13))


def test_ignoring_a_change_goes_on_at_the_same_position():
    state = {**DataLoader(Numbers(10), 2, num_workers=0).state_dict(), "position": 4}
    shrunk = DataLoader(Numbers(6), 2, num_workers=0, on_change="ignore")
    shrunk.load_state_dict(state)
    assert _items(shrunk) == [4, 5]
    gone = DataLoader(Numbers(3), 2, num_workers=0, on_change="ignore")
    gone.load_state_dict(state)
    assert gone.epoch == 1


# ------------------------------------------------------------------------------------------------------ random numbers


@pytest.mark.parametrize("how", START_METHODS)
def test_augmentation_draws_the_same_numbers_with_any_workers_and_after_a_restore(how):
    def by_item(batches: Any) -> dict[int, list[float]]:
        return {int(row[0]): row[1:].tolist() for batch in batches for row in batch}

    expected = by_item(DataLoader(Augmented(12), 4, seed=9, num_workers=0))
    assert len({tuple(numbers) for numbers in expected.values()}) == 12
    loader = DataLoader(Augmented(12), 3, seed=9, **how)
    batches = iter(loader)
    assert by_item([next(batches)]).items() <= expected.items()
    state = loader.state_dict()
    del batches
    loader.load_state_dict(state)
    assert by_item(loader).items() <= expected.items()
    assert by_item(loader) != expected  # another epoch


@pytest.mark.parametrize("dataset", [Augmented(8), Documents([3, 2, 4])], ids=["items", "stream"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_models_random_numbers_are_not_touched(dataset, num_workers):
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    seed()
    expected = [draws() for _ in range(3)]
    seed()
    loader = DataLoader(dataset, 4, num_workers=num_workers)
    drawn = [draws()]
    for batch in loader:
        assert batch is not None
        drawn.append(draws())
        if len(drawn) == 3:
            break
    assert drawn == expected


# --------------------------------------------------------------------------------------------------------- bad items


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_item_that_cannot_be_read_is_named_and_stays_ahead(num_workers):
    loader = DataLoader(Broken(10, {5}), 2, num_workers=num_workers)
    seen: list[int] = []
    with pytest.raises(DataError, match=r"item 5: OSError: cut off in the middle.*on_error='skip'") as raised:
        seen.extend(item for batch in loader for item in batch.tolist())
    assert "in __getitem__" in raised.value.__notes__[0]
    assert seen == [0, 1, 2, 3]
    assert loader.state_dict()["position"] == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_skipped_items_are_listed_and_steps_stay_equal(num_workers):
    loader = DataLoader(Broken(10, {3, 6, 7}), 2, num_workers=num_workers, on_error="skip")
    with pytest.warns(RuntimeWarning, match="skipped item"):
        batches = [(batch.tolist(), loader.valid.tolist()) for batch in loader]
    assert len(batches) == len(loader) == 5
    assert batches[1] == ([2], [True])
    assert batches[3][1] == [False]  # none of the two can be read: some other item fills it
    state = loader.state_dict()
    assert [item for item, _ in state["skipped"]] == [3, 6, 7]
    assert loader.metrics().skipped == 3
    again = DataLoader(Broken(10, {3, 6, 7}), 2, num_workers=0, on_error="skip")
    again.load_state_dict(state)
    assert again.state_dict() == state


def test_when_nothing_can_be_read_skipping_ends():
    with pytest.raises(DataError, match="cut off in the middle"):
        list(DataLoader(Broken(40, set(range(40))), 2, num_workers=0, on_error="skip"))


@pytest.mark.parametrize("dataset_kind", ["items", "stream"])
def test_retry_gets_over_an_error_that_passes(dataset_kind):
    failures = [2]

    def flaky() -> None:
        if failures[0]:
            failures[0] -= 1
            msg = "connection reset"
            raise OSError(msg)

    class Items(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 4:
                flaky()
            return index

    class Stream(Documents):
        def examples(self, index: int, start: int = 0) -> Iterator[tuple[int, int]]:
            for pair in super().examples(index, start):
                if pair == (1, 1):
                    flaky()
                yield pair

    if dataset_kind == "items":
        assert _items(DataLoader(Items(6), 2, num_workers=0, on_error="retry")) == list(range(6))
    else:
        pairs = _pairs(DataLoader(Stream([2, 3]), 2, num_workers=0, on_error="retry"))
        assert pairs == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


# -------------------------------------------------------------------------------------- any number of examples per item


@pytest.mark.parametrize("how", START_METHODS)
def test_every_example_comes_once_and_all_batches_but_the_last_are_full(how):
    counts = [3, 0, 5, 1, 0, 2, 7, 0]
    loader = DataLoader(Documents(counts), 4, shuffle=True, **how)
    assert isinstance(loader.dataset, Checkpointable)
    batches = list(loader)
    assert [len(batch[0]) for batch in batches] == [4, 4, 4, 4, 2]
    assert sorted(_pairs(batches)) == [(item, at) for item, count in enumerate(counts) for at in range(count)]
    assert loader.epoch == 1
    assert sorted(_pairs(loader)) == sorted(_pairs(batches))
    with pytest.raises(TypeError, match="nobody knows how many steps"):
        len(loader)


@pytest.mark.parametrize("how", START_METHODS)
@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_a_stream_goes_on_in_the_middle_of_an_item_with_other_workers(how, stop):
    counts = [3, 0, 9, 1, 0, 2, 3]
    first = DataLoader(Documents(counts), 4, shuffle=True, **how)
    batches = iter(first)
    seen = _pairs(next(batches) for _ in range(stop))
    state = json.loads(json.dumps(first.state_dict()))
    del batches
    first.load_state_dict(state)
    second = DataLoader(Documents(counts), 3, shuffle=True, num_workers=0)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert state["epoch"] == (1 if stop == 5 else 0)
    rest = sorted(_pairs(second))
    assert sorted(_pairs(first)) == rest
    seen += rest if stop < 5 else []
    assert sorted(seen) == [(item, at) for item, count in enumerate(counts) for at in range(count)]


def test_a_stream_without_any_example_is_an_epoch_without_steps():
    loader = DataLoader(Documents([0, 0]), 4, num_workers=0)
    assert list(loader) == []
    assert loader.epoch == 1


def test_an_error_in_a_stream_does_not_keep_the_loader():
    class Torn(Documents):
        def examples(self, index: int, start: int = 0) -> Iterator[tuple[int, int]]:
            raise EOFError

    loader = DataLoader(Torn([2, 4]), 2, num_workers=0)
    feed = weakref.ref(loader._feed)
    gc.disable()  # nobody has to wait for the garbage collector
    try:
        with contextlib.suppress(DataError):
            list(loader)
        del loader
        assert feed() is None
    finally:
        gc.enable()


def test_an_item_that_breaks_off_in_the_middle_is_named_or_skipped():
    class Torn(Documents):
        def examples(self, index: int, start: int = 0) -> Iterator[tuple[int, int]]:
            for number, pair in enumerate(super().examples(index, start), start):
                if pair[0] == 1 and number == 2:
                    msg = "unexpected end of file"
                    raise EOFError(msg)
                yield pair

    with pytest.raises(DataError, match="item 1: EOFError: unexpected end of file"):
        list(DataLoader(Torn([2, 4, 2]), 2, num_workers=0))
    loader = DataLoader(Torn([2, 4, 2]), 2, num_workers=0, on_error="skip")
    with pytest.warns(RuntimeWarning, match="skipped item 1"):
        assert _pairs(loader) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [item for item, _ in loader.state_dict()["skipped"]] == [1]


def test_augmentation_of_a_stream_is_that_of_the_example_wherever_it_is_gone_on_with():
    class Drawn(Documents):
        def examples(self, index: int, start: int = 0) -> Any:
            order = np.random.permutation(self.counts[index])  # noqa: NPY002  # the item's own seed
            return ((int(at), random.random()) for at in order[start:])

    def drawn(batches: Any) -> list[tuple[int, float]]:
        return [(int(at), float(number)) for batch in batches for at, number in zip(*batch, strict=True)]

    whole = drawn(DataLoader(Drawn([5, 6]), 2, num_workers=0))
    assert len({number for _, number in whole}) == 11
    loader = DataLoader(Drawn([5, 6]), 3, num_workers=1)
    batches = iter(loader)
    seen = drawn([next(batches)])
    again = DataLoader(Drawn([5, 6]), 4, num_workers=0)
    again.load_state_dict(loader.state_dict())
    assert seen + drawn(again) == whole


# -------------------------------------------------------------------------------------------------------------- others


def test_metrics_count_what_counts():
    loader = DataLoader(Numbers(5), 2, num_workers=0, tail="pad")
    assert loader.metrics().examples_per_s is None
    list(loader)
    metrics = loader.metrics()
    assert (metrics.batches, metrics.examples) == (3, 5)
    assert metrics.examples_per_s is not None
    assert 0 < metrics.wait_s <= metrics.elapsed_s


class Together(Broken):
    """Reads whole batches at once."""

    reads: list[list[int]]

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.reads.append(indices)
        return [self[index] for index in indices]


def test_a_data_set_that_draws_nothing_reads_whole_batches():
    dataset = Together(5, set())
    dataset.reads = []
    assert _items(DataLoader(dataset, 2, num_workers=0)) == list(range(5))
    assert dataset.reads == [[0, 1], [2, 3], [4]]
    dataset.bad = {3}
    with pytest.raises(DataError, match="item 3: OSError"):
        list(DataLoader(dataset, 2, num_workers=0))


class DrawsLate:
    """Draws for some items only, by one of the generators."""

    def __init__(self, draw: Callable[[], float], drawing: set[int]) -> None:
        self.draw = draw
        self.drawing = drawing
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.reads.append(index)
        return index, self.draw() if index in self.drawing else 0.0


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: float(torch.rand(()))], ids=["python", "numpy", "torch"]
)
def test_examples_that_draw_late_draw_what_they_draw_on_any_grid(draw):
    def numbers(drawing: set[int], batch_size: int) -> dict[int, float]:
        loader = DataLoader(DrawsLate(draw, drawing), batch_size, num_workers=0, seed=4)
        rows = [row for items, drawn in loader for row in zip(items.tolist(), drawn.tolist(), strict=True)]
        return dict(rows)

    always = numbers(set(range(12)), 4)
    for batch_size in (1, 3, 5):
        late = numbers({7, 10}, batch_size)
        assert {item: late[item] for item in (7, 10)} == {item: always[item] for item in (7, 10)}


def test_only_the_first_batch_that_draws_is_read_twice():
    dataset = DrawsLate(random.random, {5, 9})
    list(DataLoader(dataset, 3, num_workers=0))
    assert dataset.reads == [0, 1, 2, 3, 4, 5, 3, 4, 5, *range(6, 12)]


def test_a_draw_of_collate_fn_is_noticed():
    def collate(rows: list[tuple[int, float]]) -> tuple[int, float]:
        return rows[0][0], random.random()

    def drawn() -> list[tuple[int, float]]:
        return list(DataLoader(DrawsLate(random.random, set()), 4, num_workers=0, collate_fn=collate))

    first = drawn()
    random.seed(123)
    assert drawn() == first


def test_an_error_after_a_draw_is_that_of_the_seeded_example():
    class Fails(DrawsLate):
        def __getitem__(self, index: int) -> tuple[int, float]:
            raise ValueError(str(random.random()))

    def message() -> str:
        with pytest.raises(DataError) as caught:
            list(DataLoader(Fails(random.random, set()), 2, num_workers=0))
        return str(caught.value).splitlines()[0]

    first = message()
    random.seed(5)
    assert message() == first


def test_subsets_are_read_example_by_example_so_that_each_has_its_own_seed():
    everything: Any = Augmented(12)
    subset: Any = Subset(everything, range(0, 12, 2))
    one, other = (list(DataLoader(subset, size, num_workers=0)) for size in (2, 3))
    assert torch.equal(torch.cat(one), torch.cat(other))
