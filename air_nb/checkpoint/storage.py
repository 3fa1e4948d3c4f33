"""Storage back ends for torch.distributed.checkpoint, for any directory or URL, under all their names.

The files are those of torch's FileSystemWriter and FileSystemReader, and either reads what the other wrote.
"""

from __future__ import annotations

from air_nb.checkpoint.volume_reader import VolumeReader
from air_nb.checkpoint.volume_writer import VolumeWriter

__all__ = ["UCVolumeReader", "UCVolumeWriter", "VolumeReader", "VolumeWriter"]

UCVolumeWriter = VolumeWriter
"""The documented name; the same class."""
UCVolumeReader = VolumeReader
"""The documented name; the same class."""
