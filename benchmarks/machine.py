"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

__all__ = ["machine_facts"]


def machine_facts() -> dict[str, object]:
    """Cores, CPU, memory, load and versions."""
    packages = ("air_nb", "torch", "ipykernel", "ipython", "numpy")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
    } | {package: importlib.metadata.version(package) for package in packages}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
