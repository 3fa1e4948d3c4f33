"""What tells that an example has drawn: each way of drawing, by each of the three generators."""

# mypy: disable-error-code="attr-defined"
# (get_bit_generator is documented, but not in numpy's __all__.)
# ruff: noqa: NPY002

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from air_nb.data.example_rng import GeneratorStates, seed_example


@pytest.fixture(autouse=True)
def generators_as_they_were():
    before = GeneratorStates.now()
    generator = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(generator)
    before.restore()


_DRAWS = {
    "random": random.random,
    "random, whole keys": lambda: random.getrandbits(32 * 624),
    "random.gauss": lambda: random.gauss(0, 1),
    "random.seed": lambda: random.seed(1),
    "numpy": np.random.rand,
    "numpy, whole keys": lambda: np.random.bytes(4 * 624),
    "numpy, normal": np.random.randn,
    "numpy, permutation": lambda: np.random.permutation(5),
    "numpy.random.seed": lambda: np.random.seed(1),
    "torch": lambda: torch.rand(1),
    "torch, whole keys": lambda: torch.empty(624, dtype=torch.int32).random_(),
    "torch, normal, double": lambda: torch.empty(1, dtype=torch.float64).normal_(),
    "torch, normal": lambda: torch.randn(1),
    "torch.manual_seed": lambda: torch.manual_seed(1),
}


@pytest.mark.parametrize("draw", _DRAWS.values(), ids=_DRAWS)
@pytest.mark.parametrize("with_half_a_pair", [False, True])
@pytest.mark.parametrize("generator", [None, np.random.PCG64])
def test_whoever_draws_is_noticed_and_can_be_undone(draw, with_half_a_pair, generator):
    if generator is not None:
        np.random.set_bit_generator(generator(7))
        if draw is _DRAWS["numpy.random.seed"]:
            pytest.skip("numpy can't seed that one")
    if with_half_a_pair:
        np.random.randn()
        random.gauss(0, 1)
        torch.empty(1, dtype=torch.float64).normal_()
    before = GeneratorStates.now()
    assert before.is_now()
    draw()
    assert not before.is_now()
    before.restore()
    assert before.is_now()


def test_the_second_number_of_a_pair_is_noticed_though_no_memory_changes():
    np.random.randn()
    before = GeneratorStates.now()
    np.random.randn()
    now = GeneratorStates.now(before)
    assert now.memory == before.memory
    assert not before.is_now()
    assert now.is_now()
    assert GeneratorStates.now(now) is now


@pytest.mark.parametrize("n_normal", range(4))
def test_what_is_taken_over_from_earlier_states_is_what_there_is(n_normal):
    earlier = GeneratorStates.now()
    for _ in range(n_normal):
        np.random.randn()
        earlier = GeneratorStates.now(earlier)
    expected = [np.random.randn() for _ in range(3)]
    earlier.restore()
    assert [np.random.randn() for _ in range(3)] == expected


@pytest.mark.parametrize("generator", [None, np.random.PCG64])
def test_examples_have_numbers_of_their_own(generator):
    if generator is not None:
        np.random.set_bit_generator(generator(7))

    def drawn(*which: int) -> tuple[float, ...]:
        seed_example(*which)
        return random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()

    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    assert len({drawn(*which) for which in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 2, 3, 1))}) == 5


def test_a_generator_of_the_users_that_cant_be_hashed_is_looked_at_as_a_whole():
    class Odd(np.random.MT19937):
        def __eq__(self, other: object) -> bool:
            return self is other

        __hash__ = None  # type: ignore[assignment]

    before = np.random.get_bit_generator()
    np.random.set_bit_generator(Odd(1))
    try:
        states = GeneratorStates.now()
        assert states.is_now()
        np.random.rand()
        assert not states.is_now()
    finally:
        np.random.set_bit_generator(before)
