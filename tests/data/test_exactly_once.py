"""Every example once per epoch, whatever happens: kills at any moment, and restarts on any other grid.

The ledger is kept where the training is: it counts the rows that a step was made of, it is saved with a checkpoint, and
a restart goes back to the one of that checkpoint, as the weights do.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from air_nb.data.order import Order
from tests.support.simulated_ranks import Grid, World, simulated_workers

__all__ = ["simulated_workers"]

GRIDS = st.builds(
    Grid,
    world_size=st.integers(1, 5),
    num_workers=st.integers(0, 4),
    prefetch_factor=st.integers(1, 3),
    batch_size=st.one_of(st.none(), st.integers(1, 5)),
)


class Items:
    """Item i is (i, 0)."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, 0

    def everything(self) -> list[tuple[int, int]]:
        return [(index, 0) for index in range(self.items)]


class Documents:
    """Item i has so many examples: (i, 0), (i, 1), …"""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __len__(self) -> int:
        return len(self.counts)

    def examples(self, index: int, start: int = 0) -> Iterator[tuple[int, int]]:
        return ((index, number) for number in range(start, self.counts[index]))

    def everything(self) -> list[tuple[int, int]]:
        return [(index, number) for index, count in enumerate(self.counts) for number in range(count)]


DATA_SETS = st.one_of(
    st.integers(1, 40).map(Items),
    st.lists(st.integers(0, 7), min_size=1, max_size=14).map(Documents),
)


class Training(RuleBasedStateMachine):
    """A training that is killed and restarted."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.ledger: dict[int, list[Any]] = {}  # by epoch: its rows in the order of steps and ranks
        self.saved: str | None = None
        self.saved_ledger: dict[int, list[Any]] = {}

    @initialize(
        data=DATA_SETS, shuffle=st.booleans(), tail=st.sampled_from(["exact", "pad", "drop"]), seed=st.integers(0, 9)
    )
    def choose(self, data: Any, shuffle: bool, tail: str, seed: int) -> None:
        self.data = data
        self.arguments: dict[str, Any] = {"shuffle": shuffle, "tail": tail, "seed": seed}
        note(f"{vars(data)} {self.arguments}")

    @rule(grid=GRIDS, iterate_first=st.booleans())
    def restart(self, grid: Grid, iterate_first: bool) -> None:
        """Whatever ran is killed here, between two steps or before the first one; others go on from the checkpoint."""
        self.world = None
        if self.arguments["tail"] == "drop" and len(self.data) < grid.world_size * (grid.batch_size or 1):
            return  # no batch at all is an error
        self.world = World(self.data, grid, **self.arguments)
        self.ledger = {epoch: list(rows) for epoch, rows in self.saved_ledger.items()}
        if self.saved is not None:
            if iterate_first:
                self.world.begin()
            self.world.load(json.loads(self.saved))
            assert self.world.state() == json.loads(self.saved)
        self.world.begin()

    @precondition(lambda self: self.world is not None)
    @rule(steps=st.integers(1, 12), save_at=st.one_of(st.none(), st.integers(0, 11)))
    def train(self, steps: int, save_at: int | None) -> None:
        assert self.world is not None
        for step in range(steps):
            epoch = self.world.loaders[0].epoch
            rows = self.world.step()
            if rows is None:
                self.check(epoch)
                self.world.begin()
            else:
                self.ledger.setdefault(epoch, []).extend(row for rank in rows for row in rank)
            if step == save_at:
                self.save()

    @precondition(lambda self: self.world is not None)
    @rule()
    def save(self) -> None:
        assert self.world is not None
        self.saved = json.dumps(self.world.state())
        self.saved_ledger = {epoch: list(rows) for epoch, rows in self.ledger.items()}

    @precondition(lambda self: self.world is not None)
    @rule()
    def finish_the_epoch(self) -> None:
        assert self.world is not None
        epoch = self.world.loaders[0].epoch
        while (rows := self.world.step()) is not None:
            self.ledger.setdefault(epoch, []).extend(row for rank in rows for row in rank)
        self.check(epoch)
        self.world.begin()

    def check(self, epoch: int) -> None:
        """The epoch is over: each example was in one step; with one example per item, in the order of the epoch."""
        rows = self.ledger.get(epoch, [])
        if self.arguments["tail"] == "drop":
            assert Counter(rows) <= Counter(self.data.everything()), f"epoch {epoch}"
        else:
            assert Counter(rows) == Counter(self.data.everything()), f"epoch {epoch}"
        if isinstance(self.data, Items):
            order = Order(len(self.data), self.arguments["seed"], epoch, self.arguments["shuffle"])
            assert [row[0] for row in rows] == [order.item_at(at) for at in range(len(rows))]


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("simulated_workers")
def test_every_example_comes_once_per_epoch_through_kills_and_changes_of_the_grid():
    run_state_machine_as_test(
        Training,
        settings=settings(
            max_examples=250,
            stateful_step_count=15,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
