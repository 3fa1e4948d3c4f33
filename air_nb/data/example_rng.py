"""Random numbers of an example: the same on any number of ranks and loader workers, for any start method.

Before an example is read, Python's, numpy's and torch's global generators are seeded from the seed of the training, the
epoch and the example. What augmentation draws then depends on nothing else, and nothing has to be saved.

Seeding takes about as long as reading a small file. So it begins with the first batch in which anything draws, which is
read again; `GeneratorStates` tells.
"""

from __future__ import annotations

import hashlib
import random
import struct
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

__all__ = ["GeneratorStates", "seed_example"]


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
    np.random.seed(for_numpy)  # noqa: NPY002  # the global generator is the one that augmentation draws from
    # Not torch.manual_seed: it also seeds every accelerator, which takes a hundred times as long.
    torch.default_generator.manual_seed(for_torch)


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """The states of the global generators at one moment.

    Attributes:
        python: Of ``random``.
        numpy: Of ``numpy.random``.
        torch: Of torch's default generator, on the CPU.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: torch.Tensor

    @classmethod
    def now(cls) -> Self:
        """Take them."""
        return cls(random.getstate(), np.random.get_state(), torch.default_generator.get_state())  # type: ignore[arg-type]  # noqa: NPY002

    def restore(self) -> None:
        """Put the generators back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.default_generator.set_state(self.torch)

    def is_now(self) -> bool:
        """Whether nothing has drawn or seeded since, by any of the three."""
        now = GeneratorStates.now()
        return (
            self.python == now.python
            and bool((self.numpy[1] == now.numpy[1]).all())
            and self.numpy[2:] == now.numpy[2:]
            and torch.equal(self.torch, now.torch)
        )
