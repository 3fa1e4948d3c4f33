"""Which ranks on which devices: options and the GPUs of this machine -> ``Topology``, with the GPUs locked."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from air_nb.errors import DeviceError
from air_nb.monitor.choose import choose_gpus
from air_nb.monitor.gpu_report import DriverState
from air_nb.monitor.locks import GpuLocks, default_lock_directory
from air_nb.monitor.reserve import reserve_gpus
from air_nb.monitor.visible import visible_gpus
from air_nb.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from air_nb.monitor.gpu_report import GpuReport, GpuSample
    from air_nb.monitor.sampler import Sampler
    from air_nb.options import RunOptions

__all__ = ["DEVICE_VARIABLE", "Placement", "place"]

DEVICE_VARIABLE = "AIR_NB_DEVICE"
"""``cpu`` in the kernel's environment makes ``--gpus N`` mean N CPU ranks; in a rank it says what was chosen."""

_CPU_RANKS = 2
_DRIVER_TIMEOUT_S = 30.0  # without persistence mode the first call initialises every GPU, a second or more each


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks go.

    Attributes:
        topology: Ranks and devices.
        held: Releases the locks on the GPUs when closed.
        note: What the user should know about the choice, for the header.
    """

    topology: Topology
    held: AbstractContextManager[Any]
    note: str = ""


def place(options: RunOptions, sampler: Sampler, owner: str) -> Placement:
    """Choose devices and lock them.

    Args:
        options: What was asked for.
        sampler: Asked for the GPUs, unless the CPU was asked for.
        owner: Text shown to others who want the same GPUs.

    Raises:
        DeviceError: What was asked for is not there; the message says what is.
    """
    if options.device == "cpu" or os.environ.get(DEVICE_VARIABLE) == "cpu":
        return _on_cpu(options)
    report = sampler.sample(_DRIVER_TIMEOUT_S)
    if _may_use_cpu(options, report):
        return _on_cpu(options, note="no GPU found")
    try:
        return _on_gpus(options, report, owner)
    except ValueError as error:  # a type that is none, such as --gpu-type fast
        raise DeviceError(str(error)) from None


def _may_use_cpu(options: RunOptions, report: GpuReport) -> bool:
    """Whether there certainly is no GPU and none was asked for. A driver that does not answer is no reason."""
    asked = options.gpus is not None or options.gpu_ids is not None or options.gpu_type is not None
    if options.device != "auto" or asked:
        return False
    if report.driver_state in (DriverState.NO_LIBRARY, DriverState.NO_DRIVER):
        return True
    return report.driver_state == DriverState.OK and not visible_gpus(report, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _on_cpu(options: RunOptions, note: str = "") -> Placement:
    asked_gpus = options.gpus or (len(options.gpu_ids) if options.gpu_ids else None)
    count = options.nproc or asked_gpus or _CPU_RANKS
    if asked_gpus:
        note = f"{DEVICE_VARIABLE}=cpu: {count} CPU ranks instead of {asked_gpus} GPUs"
    return Placement(Topology(count, "cpu"), nullcontext(), note)


def _on_gpus(options: RunOptions, report: GpuReport, owner: str) -> Placement:
    count = options.gpus if options.gpu_ids is None else None
    if options.nproc is not None:
        _check_nproc(options.nproc, report)
        count = options.nproc

    def choose(taken: Mapping[str, str]) -> tuple[GpuSample, ...]:
        return choose_gpus(
            report,
            gpus=count,
            gpu_ids=options.gpu_ids,
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            gpu_type=options.gpu_type,
            taken=taken,
        )

    chosen, held = reserve_gpus(choose, GpuLocks(default_lock_directory()), owner)
    uuids = tuple(gpu.uuid for gpu in chosen if gpu.uuid is not None)
    labels = tuple(f"GPU {gpu.index}" for gpu in chosen)
    return Placement(Topology(len(chosen), "cuda", uuids, labels), held)


def _check_nproc(nproc: int, report: GpuReport) -> None:
    available = len(visible_gpus(report, os.environ.get("CUDA_VISIBLE_DEVICES")))
    if nproc > available:
        msg = (
            f"--nproc {nproc}: there are {available} GPUs, one for each rank. "
            f"Add --device cpu to run {nproc} ranks on the CPU."
        )
        raise DeviceError(msg)
