"""How an epoch is dealt to ranks: every position once, equally many steps, on every grid."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from air_nb.data.partition import Split, Tail

_GRIDS = {
    "items": st.integers(1, 120),
    "batch_size": st.integers(1, 9),
    "world_size": st.integers(1, 9),
    "data": st.data(),
}


def _ranks(items: int, batch_size: int, world_size: int, tail: Tail) -> list[Split]:
    return [Split(items, batch_size, rank, world_size, tail) for rank in range(world_size)]


def _deal(splits: list[Split], position: int) -> list[int]:
    """All positions that count, step by step and rank by rank."""
    dealt: list[int] = []
    for _ in range(splits[0].steps(position)):
        for split in splits:
            dealt += split.rows(position).positions
        position = splits[0].after(position)
    assert splits[0].steps(position) == 0
    return dealt


@given(**_GRIDS)
def test_exact_deals_every_position_once_and_in_order_from_wherever_it_begins(items, batch_size, world_size, data):
    start = data.draw(st.integers(0, items - 1))
    assert _deal(_ranks(items, batch_size, world_size, Tail.EXACT), start) == list(range(start, items))


@given(**_GRIDS)
def test_exact_gives_every_rank_rows_at_every_step_and_fillers_only_where_there_are_none(
    items, batch_size, world_size, data
):
    position = data.draw(st.integers(0, items - 1))
    for split in _ranks(items, batch_size, world_size, Tail.EXACT):
        rows = split.rows(position)
        assert len(rows.fillers) == (0 if rows.positions else 1)
        assert len(rows.positions) <= batch_size
        assert all(position <= filler < items for filler in rows.fillers)


@given(**_GRIDS)
def test_exact_spreads_the_rest_evenly(items, batch_size, world_size, data):
    position = data.draw(st.integers(0, items - 1))
    lengths = [len(split.rows(position).positions) for split in _ranks(items, batch_size, world_size, Tail.EXACT)]
    assert max(lengths) - min(lengths) <= 1


@given(**_GRIDS)
def test_pad_deals_as_exact_does_and_fills_every_batch(items, batch_size, world_size, data):
    start = data.draw(st.integers(0, items - 1))
    splits = _ranks(items, batch_size, world_size, Tail.PAD)
    assert _deal(splits, start) == list(range(start, items))
    for split in splits:
        rows = split.rows(start)
        assert len(rows.positions) + len(rows.fillers) == batch_size
        assert all(0 <= filler < items for filler in rows.fillers)


@given(**_GRIDS)
def test_drop_deals_full_batches_and_leaves_out_less_than_a_step(items, batch_size, world_size, data):
    start = data.draw(st.integers(0, items - 1))
    splits = _ranks(items, batch_size, world_size, Tail.DROP)
    dealt = _deal(splits, start)
    assert dealt == list(range(start, start + len(dealt)))
    assert len(dealt) % (batch_size * world_size) == 0
    assert items - start - len(dealt) < batch_size * world_size
    assert all(not split.rows(start).fillers for split in splits if splits[0].steps(start))


@given(**_GRIDS, tail=st.sampled_from(Tail), next_grid=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_another_grid_goes_on_where_the_first_one_stopped(items, batch_size, world_size, data, tail, next_grid):
    before = _ranks(items, batch_size, world_size, tail)
    stop = data.draw(st.integers(0, before[0].steps(0)))
    position = 0
    dealt: list[int] = []
    for _ in range(stop):
        for split in before:
            dealt += split.rows(position).positions
        position = before[0].after(position)
    if position < items:
        dealt += _deal(_ranks(items, next_grid[0], next_grid[1], tail), position)
    assert dealt == list(range(len(dealt)))
    if tail is not Tail.DROP:
        assert len(dealt) == items


@given(**_GRIDS)
def test_the_same_global_batch_has_the_same_rows_on_every_grid_that_makes_it(items, batch_size, world_size, data):
    position = data.draw(st.integers(0, items - 1))
    one = Split(items, batch_size * world_size, 0, 1, Tail.EXACT).rows(position)
    many = [split.rows(position).positions for split in _ranks(items, batch_size, world_size, Tail.EXACT)]
    assert list(one.positions) == [at for mine in many for at in mine]
