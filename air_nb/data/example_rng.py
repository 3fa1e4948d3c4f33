"""Random numbers of an example: the same on any number of ranks and loader workers, for any start method.

Before an example is read, Python's, numpy's and torch's global generators are seeded from the seed of the training, the
epoch and the example. What augmentation draws then depends on nothing else, and nothing has to be saved.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["kept_generators", "seed_example"]


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


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put the global generators back afterwards: in the main process they belong to the model."""
    python, numpy, torch_ = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(torch_)
