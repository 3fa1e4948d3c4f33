"""What of the kernel's state the ranks take over: directory, path, logging, warnings, back end, cell sources."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from air_nb.runs.checkpoints import RUN_DIR_VARIABLE
from air_nb.session.devices import DEVICE_VARIABLE
from air_nb.topology import Topology, threads_per_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from IPython.core.interactiveshell import InteractiveShell

    from air_nb.runs.directory import RunDirectory

__all__ = ["cell_header", "kernel_facts", "prompt_number", "rank_environment", "warning_filters"]

_THREADS_VARIABLE = "OMP_NUM_THREADS"


def kernel_facts(shell: InteractiveShell | None, threads: int, sources: Mapping[str, str]) -> dict[str, Any]:
    """The fields of ``RankTask`` that describe this process."""
    root = logging.getLogger()
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {
        "cwd": str(Path.cwd()),
        "sys_path": [entry or str(Path.cwd()) for entry in sys.path],
        "argv": list(sys.argv),
        "sources": dict(sources),
        "cell_numbers": {name: numbers[name] for name in sources if name in numbers},
        "threads": threads,
        "root_log_level": root.level,
        "log_format": _log_format(root),
        "matplotlib_backend": _matplotlib_backend(),
        "colors": shell.colors if shell is not None else "nocolor",
        "execution_count": prompt_number(shell) if shell is not None else 0,
    }


def _log_format(root: logging.Logger) -> str | None:
    if not root.handlers:
        return None
    formatter = root.handlers[0].formatter
    return getattr(formatter, "_fmt", None) or logging.BASIC_FORMAT


def _matplotlib_backend() -> str | None:
    matplotlib: Any = sys.modules.get("matplotlib")
    if matplotlib is None:
        return os.environ.get("MPLBACKEND")
    backend = matplotlib.rcParams._get("backend")  # noqa: SLF001 - the public way would choose a back end now
    return backend if isinstance(backend, str) else os.environ.get("MPLBACKEND")


def warning_filters() -> list[Any]:
    """``warnings.filters``, to be pickled with the payload (categories are classes)."""
    return list(warnings.filters)


def rank_environment(
    topology: Topology, extra: Mapping[str, str], directory: RunDirectory, run_name: str
) -> tuple[dict[str, str], int]:
    """The environment of the ranks but for torchrun's variables, and the CPU threads of each."""
    env = {**os.environ, **extra}
    env |= {"AIR_NB_RUN_ID": directory.run_id, "AIR_NB_RUN_NAME": run_name, DEVICE_VARIABLE: topology.device}
    env[RUN_DIR_VARIABLE] = str(directory.path)
    env["CUDA_VISIBLE_DEVICES"] = ",".join(topology.gpu_uuids)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        env.setdefault(name, "lo")
    default = threads_per_rank(len(os.sched_getaffinity(0)), topology.nproc_per_node)
    env.setdefault(_THREADS_VARIABLE, str(default))
    threads = env[_THREADS_VARIABLE].split(",")[0]
    return env, int(threads) if threads.isdigit() and int(threads) else default


def prompt_number(shell: InteractiveShell) -> int:
    """The number in ``In [n]`` of the cell that runs; ``execution_count`` is the next one in recent IPythons."""
    number: int = shell.displayhook.prompt_count
    return number


def cell_header(shell: InteractiveShell, cell: str) -> str:
    """What stands above the cell's code in the notebook cell: the magic line, and ``%%time`` or the like above it."""
    history = getattr(shell.history_manager, "input_hist_raw", None) or [""]
    whole = str(history[-1])
    position = whole.rfind(cell.rstrip("\n"))  # the last one: a short cell may occur in the lines above it too
    header = whole[:position] if position > 0 else "%%distributed"
    return header if header.endswith("\n") else header + "\n"
