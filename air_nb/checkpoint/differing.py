"""Tensors that are not sharded and yet not the same on all ranks: running means of BatchNorm, models that drift apart.

torch.distributed.checkpoint takes for granted that they are the same and saves any rank's. Those that are not are found
here, so that each rank can have its own back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from air_nb.checkpoint.group import Ranks

__all__ = ["differing"]

_WHOLE_BYTES = 2**18
_SAMPLES = 16  # of larger ones: training changes a weight matrix nearly everywhere, if at all


def differing(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> list[str]:
    """Names of tensors that some rank has another value of than rank 0. Collective: every rank calls.

    Up to 256 KiB are compared whole, larger ones by 16 samples of 16 KiB.

    Raises:
        CheckpointError: The ranks could not compare.
    """
    if ranks.world_size == 1:
        return []
    phase = "compare what is not sharded"
    mine = {name: _digest(tensor) for name, tensor in tensors.items()}
    summary = hashlib.blake2b(repr(sorted(mine.items())).encode()).hexdigest()
    if len(set(ranks.agree(phase, lambda: summary))) == 1:
        return []
    first, *others = ranks.agree(phase, lambda: mine)
    return [name for name in first if any(other.get(name) != first[name] for other in others)]


def _digest(tensor: torch.Tensor) -> bytes:
    content = tensor.detach().reshape(-1).view(torch.uint8)

    def part(start: int, length: int) -> memoryview:
        return content[start : start + length].cpu().numpy().data

    digest = hashlib.blake2b(digest_size=12)
    if content.numel() <= _WHOLE_BYTES:
        digest.update(part(0, content.numel()))
        return digest.digest()
    length = _WHOLE_BYTES // _SAMPLES
    last = content.numel() - length
    for sample in range(_SAMPLES):
        digest.update(part(last * sample // (_SAMPLES - 1), length))
    return digest.digest()
