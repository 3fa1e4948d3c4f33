"""Tensors to and from a checkpoint: torch's planners and a storage back end, in the order that torch's own save calls.

What is saved is a copy on the CPU that training can't change any more; what is loaded goes into memory of its own. The
live tensors only say what is sharded how. Collectives are ours (``group.py``), so a rank that is missing is named.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import DTensor

from air_nb.checkpoint.group import Ranks
from air_nb.checkpoint.host_copy import local_part
from air_nb.checkpoint.storage import VolumeReader, VolumeWriter

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import ReadItem, SavePlan

__all__ = ["Target", "is_sharded", "read", "write"]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ranks have parts of it; else each has all of it."""
    return isinstance(tensor, DTensor)


class _Saved(DefaultSavePlanner):
    """Plans for the live tensors, writes the copies."""

    def __init__(self, parts: Mapping[str, torch.Tensor]) -> None:
        # Torch's plan cache belongs to the class, that is, to all managers of the process.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, enable_plan_caching=False)
        self._parts = parts

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._parts[index.fqn]


def write(
    writer: VolumeWriter,
    live: Mapping[str, torch.Tensor],
    parts: Mapping[str, torch.Tensor],
    ranks: Ranks,
    *,
    of_first: Sequence[str] = (),
) -> None:
    """Write the tensors of all ranks, each byte once. Collective: every rank calls.

    Args:
        writer: Storage back end; the first rank's then has the records of all files.
        live: Tensors by name: DTensors, or the same on all ranks.
        parts: What this rank has of each.
        ranks: All ranks.
        of_first: Names of what only the first rank saves; else whoever has least to write does.

    Raises:
        CheckpointError: It failed on some rank.
    """
    mine = live if ranks.is_first else {name: tensor for name, tensor in live.items() if name not in of_first}
    planner = _Saved(parts)
    metadata: Metadata | None = None

    def plan() -> SavePlan:
        planner.set_up_planner(dict(mine), writer.storage_meta(), ranks.is_first)
        writer.set_up_storage_writer(ranks.is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def share_out() -> list[SavePlan]:
        nonlocal metadata
        chosen, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(chosen)

    def finish() -> None:
        assert metadata is not None
        writer.finish(metadata, results)

    plans = ranks.gather("plan who saves what", plan)
    share = ranks.scatter("plan who saves what", share_out)
    results = ranks.gather("write its shards", lambda: writer.write_data(planner.finish_plan(share), planner).wait())
    ranks.broadcast("write .metadata", finish)


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor to be loaded.

    Attributes:
        like: A tensor that is sharded like it.
        dtype: Its type in the checkpoint.
        part: Memory for this rank's part of it, on the CPU.
    """

    like: torch.Tensor
    dtype: torch.dtype
    part: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "part", torch.empty(local_part(self.like).shape, dtype=self.dtype, device="cpu"))

    def whole(self) -> torch.Tensor:
        """The loaded tensor, sharded like the other one (on its device), or as it is."""
        if not isinstance(self.like, DTensor):
            return self.part
        return DTensor.from_local(
            self.part,
            self.like.device_mesh,
            self.like.placements,
            run_check=False,
            shape=self.like.shape,
            stride=self.like.stride(),
        )


class _Loaded(DefaultLoadPlanner):
    """Plans for the live tensors, reads into memory of its own."""

    def __init__(self, targets: Mapping[str, Target]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._targets = targets

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._targets[index.fqn].part

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        del value  # torch's own would unpickle it
        msg = f"{read_item.dest_index.fqn} is no tensor"
        raise TypeError(msg)


def read(reader: VolumeReader, metadata: Metadata, targets: Mapping[str, Target]) -> None:
    """Read this rank's parts, after checking every file that they are in. Each rank for itself.

    Args:
        reader: Storage back end, which has read the metadata.
        metadata: What it has read.
        targets: By name; their memory is filled.

    Raises:
        CheckpointDamagedError: Files are missing or are not what was committed.
        OSError: The storage can't be read.
    """
    planner = _Loaded(targets)
    like: dict[str, Any] = {name: target.like for name, target in targets.items()}
    planner.set_up_planner(like, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
