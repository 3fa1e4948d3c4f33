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
from typing import Any, Self

import numpy as np
import torch

__all__ = ["GeneratorStates", "seed_example"]

_MT19937_BYTES = 4 * (624 + 1)  # mt19937_state in numpy's numpy/random/src/mt19937/mt19937.h: the key, and a position


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
        numpy_memory: The memory of its generator, which is compared 40 times as fast; None: it is not the usual one.
        torch: Of torch's default generator, on the CPU.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    numpy_memory: bytes | None
    torch: bytes

    @classmethod
    def now(cls, earlier: Self | None = None) -> Self:
        """Take them.

        Args:
            earlier: States of an earlier moment, for what has not changed since.
        """
        memory = _numpy_memory()
        is_known = earlier is not None and earlier.tells_numpy(memory)
        numpy: Any = earlier.numpy if earlier is not None and is_known else np.random.get_state(legacy=False)
        return cls(random.getstate(), numpy, memory, _torch_state())

    def restore(self) -> None:
        """Put the generators back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))

    def is_now(self) -> bool:
        """Whether nothing has drawn or seeded since, by any of the three."""
        return self._numpy_is_now() and self.torch == _torch_state() and self.python == random.getstate()

    def _numpy_is_now(self) -> bool:
        memory = _numpy_memory()
        if self.tells_numpy(memory):
            return True
        return pickle.dumps(self.numpy) == pickle.dumps(np.random.get_state(legacy=False))

    def tells_numpy(self, memory: bytes | None) -> bool:
        """Whether the state of numpy's generator, whose memory is given, is this one.

        Normal numbers are made in pairs. The second one of a pair waits elsewhere, and giving it out changes no memory.
        """
        return memory is not None and memory == self.numpy_memory and not self.numpy["has_gauss"]


def _numpy_memory() -> bytes | None:
    generator = np.random.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _torch_state() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()
