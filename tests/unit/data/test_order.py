"""The order of an epoch: a permutation, the same everywhere, and as random as its users take it to be."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_nb.data.order import Order


def _whole(order: Order) -> list[int]:
    return list(map(int, order.items_at(np.arange(order.items, dtype=np.int64))))


@given(items=st.integers(1, 3000), seed=st.integers(), epoch=st.integers(0, 10**6))
def test_every_item_stands_at_exactly_one_position(items, seed, epoch):
    assert sorted(_whole(Order(items, seed, epoch, shuffle=True))) == list(range(items))


def test_without_shuffle_an_item_stands_at_its_own_number():
    assert _whole(Order(10, 3, 1, shuffle=False)) == list(range(10))


@given(items=st.integers(2, 500), seed=st.integers(0, 99), data=st.data())
def test_a_position_is_found_alone_as_in_the_whole(items, seed, data):
    order = Order(items, seed, 2, shuffle=True)
    position = data.draw(st.integers(0, items - 1))
    assert order.item_at(position) == _whole(order)[position]


def test_the_order_is_the_same_in_every_version_of_air_nb():
    """A checkpoint of today is to go on tomorrow; a change here needs a new version of the data state."""
    assert _whole(Order(12, 7, 0, shuffle=True)) == [1, 6, 3, 0, 2, 9, 11, 8, 5, 4, 10, 7]
    assert Order(10**12, 7, 3, shuffle=True).item_at(10**7) == 992220086767


@pytest.mark.parametrize("changed", [{"seed": 1}, {"epoch": 1}])
def test_another_seed_or_epoch_has_another_order(changed):
    order = Order(items=200, seed=0, epoch=0, shuffle=True)
    assert _whole(order) != _whole(replace(order, **changed))


@pytest.mark.parametrize("items", [2, 3, 4, 5])
def test_small_data_sets_reach_every_order_about_equally_often(items):
    tries = 100 * math.factorial(items)
    counts = Counter(tuple(_whole(Order(items, seed, 0, shuffle=True))) for seed in range(tries))
    assert set(counts) == set(permutations(range(items)))
    assert max(counts.values()) < 3 * min(counts.values())


@pytest.mark.parametrize("items", [10, 100, 1000])
def test_each_item_comes_first_about_equally_often(items):
    counts = Counter(Order(items, seed, 0, shuffle=True).item_at(0) for seed in range(20 * items))
    chi_square = sum((counts[item] - 20) ** 2 / 20 for item in range(items))
    assert abs(chi_square - items) < 6 * math.sqrt(2 * items)


def test_neighbours_in_the_data_set_are_strangers_in_the_order():
    whole = np.array(_whole(Order(10_000, 0, 0, shuffle=True)))
    steps = np.abs(np.diff(whole))
    assert abs(steps.mean() - 10_000 / 3) < 150  # the mean distance of two random places
    assert abs(np.corrcoef(whole[:-1], whole[1:])[0, 1]) < 0.05
