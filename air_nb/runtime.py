"""What a cell or function calls on a rank; under torchrun and in a single process it works as well.

Runs in the ranks, on the caller's thread, and reads only the environment that torchrun and air_nb set.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

from air_nb.protocol.tracking import REQUEST_FILE
from air_nb.tracking import plain
from air_nb.tracking.spool import SpoolEntry, rank_spool

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

__all__ = [
    "checkpoint_root",
    "device",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "log_metrics",
    "run_id",
]


def get_rank() -> int:
    """Global rank; 0 outside a distributed run."""
    return int(os.environ.get("RANK", "0"))


def get_local_rank() -> int:
    """Rank on this node, the index of this rank's GPU; 0 outside a distributed run."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_size() -> int:
    """Number of ranks; 1 outside a distributed run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def get_local_world_size() -> int:
    """Number of ranks on this node; 1 outside a distributed run."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def get_node_rank() -> int:
    """Index of this node; 0 outside a distributed run."""
    return int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0")))


def device() -> torch.device:
    """The device of this rank: ``cuda:<local rank>``, or ``cpu`` for CPU ranks and where there is no GPU."""
    import torch

    if os.environ.get("AIR_NB_DEVICE") != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", get_local_rank())
    return torch.device("cpu")


def init_process_group(timeout: timedelta | None = None) -> torch.device:
    """Bind this rank's device and initialise the default process group. Collective: every rank calls.

    The backend is ``cpu:gloo,cuda:nccl`` on GPUs, so that CPU tensors (asynchronous checkpoints) work too, and gloo on
    the CPU. Does nothing if the group is there already. A cell's group is destroyed when the cell ends; plain
    ``torch.distributed.init_process_group("nccl")`` works just as well.

    Args:
        timeout: Time limit of collectives; None is torch's default.

    Returns:
        The device of this rank.

    Raises:
        RuntimeError: Outside a distributed run with torchrun's variables missing, or the ranks did not meet in time.
    """
    import torch
    import torch.distributed as dist

    chosen = device()
    if dist.is_initialized():
        return chosen
    if "MASTER_ADDR" not in os.environ:
        msg = (
            "init_process_group() needs the variables that torchrun and %%distributed set "
            "(MASTER_ADDR, RANK, WORLD_SIZE)"
        )
        raise RuntimeError(msg)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=chosen)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    return chosen


def run_id() -> str | None:
    """Id of the air_nb run, as in ``%air runs``; None outside one."""
    return os.environ.get("AIR_NB_RUN_ID")


def checkpoint_root() -> Path:
    """Where this run's checkpoints belong: ``AIR_NB_CHECKPOINT_ROOT``, else ``<cwd>/checkpoints/<run name>``."""
    chosen = os.environ.get("AIR_NB_CHECKPOINT_ROOT")
    if chosen:
        return Path(chosen)
    return Path.cwd() / "checkpoints" / os.environ.get("AIR_NB_RUN_NAME", "default")


def log_metrics(metrics: Mapping[str, SupportsFloat], *, step: int, every: int = 1) -> None:
    """Log metrics of a training loop to the MLflow run of this launch: all in one entry, and only every so many steps.

    ``mlflow.log_metric`` works in a rank too. This one is for loops with many steps: it does not import MLflow, costs
    tens of microseconds, and ``every`` keeps a long training under the number of steps that a server takes (10 million
    on hosted ones). A step that is left out costs nothing, not even the reading of a value from the GPU.

    In a tracked launch the metrics go to its run, from every rank; with ``--no-mlflow`` nowhere. In a plain script or
    under torchrun they go to the run that is active, or that ``MLFLOW_RUN_ID`` names, in the background: all are sent
    when ``mlflow.end_run()`` returns. If there is no run they are not logged, and a warning says so once.

    Args:
        metrics: Value by name; tensors with one element will do.
        step: Number of the step.
        every: Log the steps that it divides.

    Raises:
        ValueError: ``every`` is not positive, or a value is no number.
        TypeError: A value is no number.
    """
    if every < 1:
        msg = f"every={every}: log_metrics() logs the steps that `every` divides, so it is 1 or more"
        raise ValueError(msg)
    if step % every:
        return
    directory = os.environ.get("AIR_NB_RUN_DIR")
    if directory is not None and _is_tracked(directory):
        now_ms = time.time_ns() // 1_000_000
        entry = SpoolEntry(metrics=[(name, plain.number(value), now_ms, int(step)) for name, value in metrics.items()])
        rank_spool(Path(directory), get_rank()).append(entry)
    elif run_id() is None:
        plain.log_metrics(metrics, step)


@functools.cache
def _is_tracked(directory: str) -> bool:
    """Of a run that is not, nobody would ever read the spool."""
    return (Path(directory) / REQUEST_FILE).exists()
