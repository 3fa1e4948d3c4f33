"""What has been consumed of items with any number of examples: merged over ranks, dealt again to others."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from air_nb.data.position import Position, Progress, deal, merge

_GRID = st.tuples(st.integers(1, 5), st.integers(1, 4))


def _share(position: Position, items: int, progress: Progress) -> list[int]:
    return list(position.remaining(items, progress.start, progress.step))


def _deals(grid: tuple[int, int]) -> list[Progress]:
    world_size, num_workers = grid
    return [deal(rank, world_size, worker, num_workers) for rank in range(world_size) for worker in range(num_workers)]


@st.composite
def positions(draw, items: int = 60) -> Position:
    """Any position that an epoch of so many items can have."""
    complete = draw(st.sets(st.integers(0, items - 1), max_size=items - 1))
    open_items = sorted(set(range(items)) - complete)
    partial = draw(st.dictionaries(st.sampled_from(open_items), st.integers(1, 9), max_size=5))
    return merge(Position(3), items, [Progress(at, items, 1) for at in complete] + _idle(items, complete, partial))


def _idle(items: int, complete: set[int], partial: dict[int, int]) -> list[Progress]:
    return [Progress(at, items, 0, partial.get(at, 0)) for at in range(items) if at not in complete]


@given(base=positions(), grid=_GRID)
def test_every_remaining_position_is_dealt_to_exactly_one_worker(base, grid):
    shares = [at for progress in _deals(grid) for at in _share(base, 60, progress)]
    assert sorted(shares) == list(base.remaining(60))
    assert not {at for at in shares if at < base.position or any(start <= at < stop for start, stop in base.done)}


@given(base=positions(), grid=_GRID, seed=st.integers())
def test_what_was_consumed_is_what_the_next_grid_is_not_dealt(base, grid, seed):
    draws = random.Random(seed)
    deals = _deals(grid)
    consumed: set[int] = set()
    examples = dict(base.partial)
    for progress in deals:
        share = _share(base, 60, progress)
        for at in share[: draws.randint(0, len(share))]:
            progress.add(draws.randint(0, 5), ended=True)
            consumed.add(at)
            examples.pop(at, None)
        if progress.items < len(share) and (count := draws.randint(0, 3)):
            progress.add(count, ended=False)
            examples[share[progress.items]] = examples.get(share[progress.items], 0) + count
    after = merge(base, 60, deals)
    assert list(after.remaining(60)) == [at for at in base.remaining(60) if at not in consumed]
    assert dict(after.partial) == examples
    assert after.epoch == base.epoch


@given(base=positions(), grid=_GRID)
def test_doing_nothing_changes_nothing(base, grid):
    assert merge(base, 60, _deals(grid)) == base


@given(base=positions())
def test_a_position_is_written_in_one_way_only(base):
    spans = [(0, base.position), *base.done]
    assert all(stop < start for (_, stop), (start, _) in pairwise(spans))
    assert all(start < stop for start, stop in base.done)


def test_the_state_of_millions_of_items_is_small_and_found_at_once():
    deals = _deals((4, 4))
    for progress in deals:
        progress.items = 600_000
    deals[5].items -= 100
    position = merge(Position(), 10**7, deals)
    assert 9_598_000 < position.position < 9_600_000
    assert len(position.done) <= 101


@given(base=positions(), items=st.integers(1, 60))
def test_clipped_to_fewer_items_nothing_beyond_them_is_left(base, items):
    clipped = base.clipped(items)
    assert all(at < items for at in clipped.remaining(items))
    assert all(at < items for at in clipped.partial)
