"""Random number generators of a rank: Python's, numpy's, torch's and its GPU's.

They are saved for each rank. Restored on as many ranks or fewer, each gets its own back; ranks that were not there when
it was saved derive theirs from rank 0's, so that they differ from all others and are the same at each restore.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["apply", "capture", "derive", "seed_everything"]


def seed_everything(seed: int, *, rank: int | None = None) -> None:
    """Seed Python's, numpy's and torch's generators (the GPUs', too) of this rank.

    Every rank gets numbers of its own, so that dropout and augmentation differ between ranks. Weights are therefore
    initialised differently: DistributedDataParallel copies rank 0's to all; for ``fully_shard`` initialise the model
    before this call, under ``torch.manual_seed``, or load it. The order of ``air_nb.data`` has its own seed.

    Args:
        seed: Any whole number.
        rank: By default that of torch.distributed, else 0.
    """
    if rank is None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    _seed(b"%d/%d" % (seed, rank))


def _seed(text: bytes) -> None:
    for_python, for_torch, for_numpy = struct.unpack("<QqI", hashlib.blake2b(text, digest_size=20).digest())
    random.seed(for_python)
    np.random.seed(for_numpy)  # noqa: NPY002 - the global generator is the one that libraries draw from
    torch.manual_seed(for_torch)


def capture() -> dict[str, Any]:
    """The state of all generators of this rank; of a GPU only if it is in use."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_gpu else None,
    }


def apply(state: Mapping[str, Any]) -> None:
    """Put the generators of this rank into a state that ``capture`` returned; a GPU's only where there is one."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def derive(state: Mapping[str, Any], rank: int) -> None:
    """Seed the generators of a rank that was not there when ``state`` was captured on rank 0."""
    _seed(b"%s/%d" % (hashlib.blake2b(state["torch"].numpy().tobytes()).digest(), rank))
