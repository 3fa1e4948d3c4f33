"""Random number generators of ranks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from air_nb.checkpoint import rng
from air_nb.checkpoint.values import decode, encode, freeze, thaw


@pytest.fixture(autouse=True)
def _kept_generators():
    before = rng.capture()
    yield
    rng.apply(before)


def draws():
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),  # noqa: NPY002 - the global generator is what is meant
        float(np.random.randn()),  # noqa: NPY002
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
    )


def test_what_was_captured_gives_the_same_numbers_again():
    rng.seed_everything(3)
    random.gauss(0, 1)  # leaves its second value for the next call; so does numpy
    np.random.randn()  # noqa: NPY002
    state = rng.capture()
    first = draws()
    draws()
    rng.apply(state)
    assert draws() == first


def test_a_state_survives_a_file_that_is_read_without_running_code():
    rng.seed_everything(4)
    content = encode(freeze(rng.capture(), "rng"))
    first = draws()
    rng.apply(thaw(decode(content)))
    assert draws() == first


def test_capturing_draws_nothing():
    rng.seed_everything(5)
    rng.capture()
    first = draws()
    rng.seed_everything(5)
    assert draws() == first


def test_each_rank_and_each_seed_has_its_own_numbers():
    seen = set()
    for seed in range(4):
        for rank in range(4):
            rng.seed_everything(seed, rank=rank)
            seen.add(repr(draws()))
    assert len(seen) == 16


def test_the_same_seed_and_rank_have_the_same_numbers():
    rng.seed_everything(11, rank=2)
    first = draws()
    rng.seed_everything(11, rank=2)
    assert draws() == first


def test_ranks_that_were_not_there_derive_numbers_of_their_own_again_and_again():
    rng.seed_everything(1, rank=0)
    state = rng.capture()
    rank_0 = draws()

    def derived(rank):
        rng.derive(state, rank)
        return draws()

    assert len({repr(one) for one in (rank_0, derived(4), derived(5), derived(6))}) == 4
    assert derived(5) == derived(5)


def test_ranks_derive_other_numbers_at_another_moment():
    rng.seed_everything(1, rank=0)
    early = rng.capture()
    torch.rand(1)
    late = rng.capture()
    rng.derive(early, 4)
    first = draws()
    rng.derive(late, 4)
    assert draws() != first
