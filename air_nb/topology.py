"""How many ranks, on what: the arithmetic of a run (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DeviceKind", "Topology", "threads_per_rank"]

DeviceKind = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of a run and their devices.

    Attributes:
        nproc_per_node: Ranks on this node.
        device: Kind of device the ranks compute on.
        gpu_uuids: NVML UUIDs of the chosen GPUs; ``LOCAL_RANK`` indexes them. Empty on the CPU.
        gpu_labels: One short text per GPU for the header (``"GPU 3"``), same order.
        nnodes: Machines.
    """

    nproc_per_node: int
    device: DeviceKind
    gpu_uuids: tuple[str, ...] = ()
    gpu_labels: tuple[str, ...] = ()
    nnodes: int = 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nnodes * self.nproc_per_node


def threads_per_rank(cores: int, nproc_per_node: int) -> int:
    """CPU threads for each rank: the cores shared out, at least torchrun's 1."""
    return max(1, cores // nproc_per_node)
