"""Random numbers of an example: the same on any number of ranks and loader workers, for any start method.

Before an example is read, Python's, numpy's and torch's global generators are seeded from the seed of the training, the
epoch and the example. What augmentation draws then depends on nothing else, and nothing has to be saved.

Seeding takes about as long as reading a small file. So it begins with the first batch in which anything draws, which is
read again; `GeneratorStates` tells.
"""

# mypy: disable-error-code="attr-defined"
# (get_bit_generator is documented, but not in numpy's __all__.)
# ruff: noqa: NPY002  # the global generator is the one that augmentation draws from

from __future__ import annotations

# mypy: disable-error-code="attr-defined"
# (get_bit_generator is documented, but not in numpy's __all__.)
# ruff: noqa: NPY002  # the global generator is the one that augmentation draws from
import ctypes
import hashlib
import pickle
import random
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch

__all__ = ["GeneratorStates", "seed_example"]

_PYTHON: Any = random._inst  # noqa: SLF001  # whose methods the functions of random are
# All three are Mersenne twisters: a key of 624 words, and a position in it. In memory Python's has the position first
# (RandomObject in CPython's _randommodule.c), numpy's last (mt19937_state in mt19937.h); torch's state has it first
# (CPUGeneratorImpl.cpp), and last the second number of a pair of normal ones.
_Beginning = ctypes.c_char * 64
_Position = ctypes.c_char * 4
_MT19937_POSITION_AT = 4 * 624
_PYTHONS_MEMORY = _Beginning.from_address(id(_PYTHON) + object.__basicsize__)


def seed_example(seed: int, epoch: int, item: int, number: int = 0) -> None:
    """Seed the global generators of this process for one example.

    Args:
        seed: Seed of the training.
        epoch: Number of the epoch.
        item: Work item.
        number: Number of the example within its item.
    """
    text = b"%d/%d/%d/%d" % (seed, epoch, item, number)
    for_python, for_torch, for_numpy = struct.unpack("<QqI", hashlib.blake2b(text, digest_size=20).digest())
    random.seed(for_python)
    generator = np.random.get_bit_generator()
    if type(generator) is np.random.MT19937:
        np.random.seed(for_numpy)
    else:  # the user has set another one
        np.random.set_state(dict(type(generator)(for_numpy).state))
    # Not torch.manual_seed: it also seeds every accelerator, which takes a hundred times as long.
    torch.default_generator.manual_seed(for_torch)


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """The states of the global generators at one moment.

    Attributes:
        python: Of ``random``.
        numpy: Of ``numpy.random``.
        torch: Of torch's default generator, on the CPU.
        memory: What of it changes with every draw, read from memory, for less; None: numpy's is not the usual one.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: bytes
    memory: tuple[Any, ...] | None

    @classmethod
    def now(cls, earlier: Self | None = None) -> Self:
        """Take them.

        Args:
            earlier: States of an earlier moment, which may still be those of now.
        """
        memory = _memory()
        if earlier is not None and earlier.are_told_by(memory):
            return earlier
        numpy: Any = np.random.get_state(legacy=False)
        return cls(random.getstate(), numpy, _torch_state(), memory)

    def restore(self) -> None:
        """Put the generators back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))

    def is_now(self) -> bool:
        """Whether nothing has drawn or seeded since, by any of the three."""
        memory = _memory()
        if self.are_told_by(memory) or memory != self.memory:
            return memory == self.memory
        now = type(self).now()
        return (
            self.python == now.python
            and self.torch == now.torch
            and pickle.dumps(self.numpy) == pickle.dumps(now.numpy)  # of arrays and numbers
        )

    def are_told_by(self, memory: tuple[Any, ...] | None) -> bool:
        """Whether these are the states if that is the memory.

        Normal numbers are made in pairs. The second one of numpy's waits where nobody can look, and giving it out
        changes nothing else.
        """
        return memory is not None and memory == self.memory and not self.numpy["has_gauss"]


def _memory() -> tuple[Any, ...] | None:
    """What changes with every draw: positions, and the beginnings of keys, which are made anew every 624 numbers."""
    generator = np.random.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return None
    beginning, position, _ = _numpys_memory(generator)
    torchs = torch.default_generator.get_state()
    start = torchs.data_ptr()
    return (
        _PYTHONS_MEMORY.raw,
        _PYTHON.gauss_next,
        beginning.raw,
        position.raw,
        _Beginning.from_address(start).raw,
        _Beginning.from_address(start + torchs.nbytes - ctypes.sizeof(_Beginning)).raw,
    )


@lru_cache(maxsize=1)
def _numpys_memory(generator: Any) -> tuple[Any, Any, Any]:
    """Where numpy's generator is in memory, and the generator, whose memory it is."""
    at = generator.ctypes.state_address
    return _Beginning.from_address(at), _Position.from_address(at + _MT19937_POSITION_AT), generator


def _torch_state() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()
