"""Data for training: files through a cache, in an order and from a position that no number of ranks or workers changes.

Nothing heavy is imported until it is asked for: those who only list checkpoints never load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from air_nb.checkpoint import UCVolumeReader, UCVolumeWriter, VolumeReader, VolumeWriter
    from air_nb.data.dataset import FileDataset, UCVolumeDataset
    from air_nb.data.loader import DataLoader
    from air_nb.data.meter import LoaderMetrics
    from air_nb.data.stream import Checkpointable

__all__ = [
    "Checkpointable",
    "DataLoader",
    "FileDataset",
    "LoaderMetrics",
    "UCVolumeDataset",
    "UCVolumeReader",
    "UCVolumeWriter",
    "VolumeReader",
    "VolumeWriter",
]

_HOMES = {
    "Checkpointable": "air_nb.data.stream",
    "DataLoader": "air_nb.data.loader",
    "FileDataset": "air_nb.data.dataset",
    "LoaderMetrics": "air_nb.data.meter",
    "UCVolumeDataset": "air_nb.data.dataset",
    # By name: the storage back ends stand above this package, and are documented to be found here too.
    "UCVolumeReader": "air_nb.checkpoint",
    "UCVolumeWriter": "air_nb.checkpoint",
    "VolumeReader": "air_nb.checkpoint",
    "VolumeWriter": "air_nb.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOMES.keys())
