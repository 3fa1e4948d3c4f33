"""Loader workers: how many, what they ignore, whether their memory suffices, and what is said when one dies.

They are torch's own, subprocesses of the rank. They ignore the signals that a terminal or a batch system sends to the
whole process group, which are meant for the rank; the rank ends them, and they end when it dies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import TensorDataset

__all__ = ["WorkerStart", "default_num_workers", "describe_deaths", "kill", "tensor_bytes", "warn_if_shm_is_short"]

_SHM = "/dev/shm"  # noqa: S108  # where Linux keeps shared memory, not a place of ours
_SHM_PER_WORKER_BYTES = 128 << 20
_MOST_WORKERS = 8
_HINTS = {
    "SIGKILL": "most often the system was out of memory: fewer workers, or a smaller batch",
    "SIGBUS": f"most often {_SHM} is full: fewer workers, a smaller prefetch_factor, or a larger {_SHM} "
    "(docker run --shm-size=8g)",
    "SIGSEGV": "a library crashed: num_workers=0 shows where",
}


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What each loader worker does first.

    Attributes:
        then: The user's ``worker_init_fn``.
    """

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Ignore the signals that are meant for the rank, and end with it."""
        threading.Thread(target=_end_with_the_rank, name="air_nb lifeline", daemon=True).start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)


def _end_with_the_rank() -> None:
    """Wait for the rank to die, and die.

    torch's worker only looks, between batches, whether its parent is another one: one that is stuck in a file never
    does, and one from a forkserver has a parent that lives as long as it does.
    """
    rank = multiprocessing.parent_process()
    if rank is None or rank.pid is None:
        return
    with contextlib.suppress(ProcessLookupError):  # it has died already
        death = select.poll()  # select() has no descriptors above 1023
        death.register(os.pidfd_open(rank.pid), select.POLLIN)
        death.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def default_num_workers(dataset: Any) -> int:
    """How many loader workers a rank has if nobody says: 0 for data in memory, else what cores and /dev/shm allow.

    One core of each rank's share is left to the rank, and each worker is to have 128 MiB of shared memory.
    """
    if isinstance(dataset, (list, tuple, TensorDataset)):
        return 0
    local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    by_cores = min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // local_ranks - 1)
    by_memory = _free_shm_bytes() // local_ranks // _SHM_PER_WORKER_BYTES
    if by_memory < by_cores:
        warnings.warn(
            f"{by_memory} loader workers instead of {by_cores}: {_SHM} has {_free_shm_bytes() >> 20} MiB left for "
            f"{local_ranks} ranks. Make it larger (docker run --shm-size=8g), or set num_workers",
            RuntimeWarning,
            stacklevel=3,
        )
    return max(0, min(by_cores, by_memory))


def _free_shm_bytes() -> int:
    try:
        return shutil.disk_usage(_SHM).free
    except OSError:  # none: multiprocessing finds another place
        return 1 << 62


def warn_if_shm_is_short(batch_bytes: int, n_batches: int) -> None:
    """Warn if the batches that workers prefetch don't fit: tmpfs says so only by SIGBUS, in the middle of an epoch."""
    free_bytes = _free_shm_bytes()
    if batch_bytes * n_batches > free_bytes:
        warnings.warn(
            f"loader workers may prefetch {n_batches} batches of {batch_bytes >> 20} MiB each, but {_SHM} has "
            f"{free_bytes >> 20} MiB left: a worker would die by SIGBUS. Fewer workers, a smaller prefetch_factor, "
            f"or a larger {_SHM} (docker run --shm-size=8g)",
            RuntimeWarning,
            stacklevel=2,
        )


def tensor_bytes(batch: Any) -> int:
    """Size of the tensors in a batch: what goes through shared memory."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, Mapping):
        return sum(map(tensor_bytes, batch.values()))
    if isinstance(batch, (list, tuple)):
        return sum(map(tensor_bytes, batch))
    return 0


def describe_deaths(workers: Sequence[BaseProcess], reading: Callable[[], Mapping[int, str]]) -> str | None:
    """Say which workers died, by what, and what they had to read; None if all live.

    Args:
        workers: The worker processes, index = worker.
        reading: Says what each was reading or was to read next; asked only if one has died.
    """
    dead = [(number, worker) for number, worker in enumerate(workers) if worker.exitcode]
    if not dead:
        return None
    works = reading()
    return "; ".join(_describe_death(number, worker, works.get(number)) for number, worker in dead)


def _describe_death(number: int, worker: BaseProcess, work: str | None) -> str:
    exit_code = worker.exitcode or 0
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = f" ({_HINTS[name]})" if name in _HINTS else ""
        how = f"was killed by {name}{hint}"
    else:
        how = f"exited with code {exit_code}"
    reading = f"; it was reading {work}" if work else ""
    return f"loader worker {number} (pid {worker.pid}) {how}{reading}"


def kill(workers: Sequence[BaseProcess]) -> None:
    """End workers that did not end when they were told to; they ignore SIGTERM, so nothing else would."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join(timeout=5)
