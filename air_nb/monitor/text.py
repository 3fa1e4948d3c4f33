"""How GPUs and their processes are written in errors and tables. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from air_nb.monitor.gpu_report import GpuProcess, GpuSample

__all__ = ["describe_memory", "describe_process", "gib", "plural", "process_label"]


def gib(bytes_: int) -> str:
    """A number of bytes in GiB with one decimal, without the unit."""
    return f"{bytes_ / 2**30:.1f}"


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """The count with the noun in its right form, such as "1 GPU" and "2 GPUs"."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def describe_memory(gpu: GpuSample) -> str:
    """Memory in use and in all, "n/a" for what is unknown."""
    if gpu.memory_used_bytes is None and gpu.memory_total_bytes is None:
        return "n/a"
    used = "n/a" if gpu.memory_used_bytes is None else gib(gpu.memory_used_bytes)
    total = "n/a" if gpu.memory_total_bytes is None else gib(gpu.memory_total_bytes)
    return f"{used} of {total} GiB"


def process_label(process: GpuProcess) -> str:
    """What to call a process of which nothing else is known: "pid 4711 python of ann", without what is unknown."""
    name = f" {process.name}" if process.name else ""
    user = f" of {process.user}" if process.user else ""
    return f"pid {process.pid}{name}{user}"


def describe_process(process: GpuProcess) -> str:
    """Who holds how much memory: "pid 4711 python of ann 41.0 GiB", without what is unknown."""
    memory = "" if process.used_bytes is None else f" {gib(process.used_bytes)} GiB"
    return f"{process_label(process)}{memory}"
