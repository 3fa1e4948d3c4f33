"""Which item stands at which position of an epoch: a seeded permutation that is computed, never stored.

Pure. A Feistel network is a bijection on the numbers of b bits whatever its round function is; those that fall outside
the data set are sent through it again until they are inside ("cycle walking": Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002). So any position of any epoch is found in constant time and memory, at the 10
millionth as at the first.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["Order"]

_ROUNDS = 8
# The finaliser of splitmix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014).
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Order:
    """The order of one epoch: a function of the seed, the epoch and the number of items, and of nothing else.

    Attributes:
        items: Number of items.
        seed: Seed of the whole training.
        epoch: Number of the epoch; each has an order of its own.
        shuffle: False: position and item are the same number.
    """

    items: int
    seed: int
    epoch: int
    shuffle: bool

    def items_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The items at these positions.

        Args:
            positions: int64 [any length], each in ``[0, items)``.

        Returns:
            int64, of the same length.
        """
        if not self.shuffle or self.items == 1:
            return positions
        bits = (self.items - 1).bit_length()
        keys = _round_keys(self.seed, self.epoch, self.items)
        values = _encipher(positions.astype(np.uint64), bits, keys)
        while (outside := values >= self.items).any():
            values[outside] = _encipher(values[outside], bits, keys)
        return values.astype(np.int64)

    def item_at(self, position: int) -> int:
        """The item at one position."""
        return int(self.items_at(np.array([position], dtype=np.int64))[0])


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int, items: int) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{items}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _encipher(values: npt.NDArray[np.uint64], bits: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Permute the numbers of so many bits: the two halves take turns, so their lengths may differ by one."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number, key in enumerate(keys):
        if number % 2:
            low = low ^ (_mix(high, key) & low_mask)
        else:
            high = high ^ (_mix(low, key) & high_mask)
    return high << low_bits | low


def _mix(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    mixed = (values ^ key) * _MULTIPLY_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLY_2
    return mixed ^ mixed >> np.uint64(31)
