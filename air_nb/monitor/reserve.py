"""Chooses GPUs and locks them, as one step that two kernels can make at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from air_nb.monitor.locks import GpuLocks, Held, Taken

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from air_nb.monitor.gpu_report import GpuSample

__all__ = ["reserve_gpus"]


def reserve_gpus(
    choose: Callable[[Mapping[str, str]], tuple[GpuSample, ...]], locks: GpuLocks, owner: str
) -> tuple[tuple[GpuSample, ...], Held]:
    """Choose GPUs that no other run holds, and hold them.

    Between looking and locking another kernel may take one: then the choice is made again without it. That ends, since
    each round leaves one GPU more out until there is a choice or none.

    Args:
        choose: Chooses among the GPUs without those taken (UUID to owner); raises if it can't. Usually `choose_gpus`
            with everything but `taken` given.
        locks: Where to lock.
        owner: One line for others to read: which run in which process.

    Returns:
        The GPUs in rank order and their locks, which the caller closes when the ranks are gone.

    Raises:
        DeviceError: whatever `choose` raises, or if the lock directory can't be used.
    """
    taken = locks.held_uuids()
    while True:
        chosen = choose(taken)
        try:
            return chosen, locks.acquire([gpu.uuid for gpu in chosen if gpu.uuid is not None], owner)
        except Taken as lost:
            taken = {**locks.held_uuids(), lost.uuid: lost.owner, **taken}
