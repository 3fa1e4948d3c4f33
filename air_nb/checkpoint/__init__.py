"""Checkpoints that restore bit for bit after any crash, or are not listed as valid.

Listing, verifying and pruning (``list_checkpoints``, ``find_latest_valid``, ``verify``, ``prune``) load no torch; what
saves and restores does, on first use. Works on ranks, in a plain script and in a single process, without Jupyter.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from air_nb.checkpoint.catalog import CheckpointInfo, Verdict, find_latest_valid, list_checkpoints, prune, verify

if TYPE_CHECKING:
    from air_nb.checkpoint.manager import CheckpointManager
    from air_nb.checkpoint.rng import seed_everything
    from air_nb.checkpoint.storage import UCVolumeReader, UCVolumeWriter, VolumeReader, VolumeWriter

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "UCVolumeReader",
    "UCVolumeWriter",
    "Verdict",
    "VolumeReader",
    "VolumeWriter",
    "find_latest_valid",
    "list_checkpoints",
    "prune",
    "seed_everything",
    "verify",
]

_NEEDS_TORCH = {
    "CheckpointManager": "manager",
    "UCVolumeReader": "storage",
    "UCVolumeWriter": "storage",
    "VolumeReader": "storage",
    "VolumeWriter": "storage",
    "seed_everything": "rng",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name not in _NEEDS_TORCH:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
