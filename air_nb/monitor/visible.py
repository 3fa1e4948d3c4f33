"""Which GPUs the kernel's own CUDA_VISIBLE_DEVICES leaves, in its order. Pure.

Slurm and hubs set the variable, so "GPU 0" of a notebook is the first one it names. The rules are CUDA's (CUDA C++
Programming Guide, "CUDA environment variables") and, for what the guide leaves open, those that torch.cuda follows
without initialising CUDA: entries are numbers or beginnings of UUIDs, the first invalid one ends the list, and a GPU
named twice leaves none at all. Numbers are taken in NVML's order; CUDA's own default order differs only where GPUs of
different models share a machine.
"""

from __future__ import annotations

from air_nb.monitor.gpu_report import GpuReport, GpuSample

__all__ = ["visible_gpus"]


def visible_gpus(report: GpuReport, visible: str | None) -> tuple[GpuSample, ...]:
    """The GPUs that CUDA shows to a process with this variable; the position is CUDA's index.

    Args:
        report: All GPUs of the machine.
        visible: Value of CUDA_VISIBLE_DEVICES, None if it is not set.

    Returns:
        Lost GPUs too, as far as they are named by number or by a known UUID. For an entry that names a MIG device a
        sample that knows the UUID only: NVML's numbers are about the whole GPU.
    """
    if visible is None:
        return report.gpus
    found: list[GpuSample] = []
    for entry in (part.strip() for part in visible.split(",")):
        gpu = _mig_device(entry, len(found), report) if entry.startswith("MIG-") else _find(entry, report)
        if gpu is None:
            break
        if any((gpu.uuid or gpu.index) == (other.uuid or other.index) for other in found):
            return ()
        found.append(gpu)
    return tuple(found)


def _find(entry: str, report: GpuReport) -> GpuSample | None:
    if entry.isdecimal():
        return next((gpu for gpu in report.gpus if gpu.index == int(entry)), None)
    if not entry.startswith("GPU-"):
        return None
    matches = [gpu for gpu in report.gpus if gpu.uuid is not None and gpu.uuid.lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None


def _mig_device(uuid: str, position: int, report: GpuReport) -> GpuSample:
    names = {gpu.name for gpu in report.gpus if gpu.mig}
    return GpuSample(position, uuid, names.pop() if len(names) == 1 else None, mig=True)
