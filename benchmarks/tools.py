"""How each tool is used from a notebook: the cells a user would write to run the same code on every rank.

The code may use ``rank`` and ``world``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

from air_nb.topology import threads_per_rank
from benchmarks.harness import BenchKernel, bench_kernel, free_port, settle

__all__ = ["Accelerate", "AirNb", "Ipyparallel", "Tool", "Torchrun", "installed_peers", "ready_kernels"]

_WHO = 'import os\nrank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])\n'
_READY_S = 180.0


class Tool(ABC):
    """One way to run code on every rank."""

    name: ClassVar[str]
    module: ClassVar[str] = "torch"
    group = 'import torch.distributed as dist\ndist.init_process_group("gloo")\n'
    """Code that makes the default process group."""

    @classmethod
    def is_installed(cls) -> bool:
        """Whether it can be measured here."""
        return importlib.util.find_spec(cls.module) is not None

    def prepare(self, kernel: BenchKernel, ranks: int) -> None:
        """Whatever its user does once per notebook, to its end; nothing for most."""
        del kernel, ranks

    @abstractmethod
    def cell(self, code: str, ranks: int, directory: Path) -> str:
        """The cell that runs the code; files it needs are written to the directory."""


class AirNb(Tool):
    """``%%distributed``."""

    name = "air_nb"

    def __init__(self, options: str = "") -> None:
        self._options = options

    def prepare(self, kernel: BenchKernel, ranks: int) -> None:
        """Warm to the end: also what is imported only while idle."""
        kernel.ok("%load_ext air_nb")
        kernel.ok(self.cell("import torch\nNone", ranks, kernel.cwd), timeout_s=_READY_S)
        settle(kernel)

    def cell(self, code: str, ranks: int, directory: Path) -> str:  # noqa: ARG002 - needs no file
        """The magic line and the code."""
        return f"%%distributed --nproc {ranks} --device cpu {self._options}\n{_WHO}{code}"


class Torchrun(Tool):
    """``!torchrun script.py``, with the CPU threads that air_nb's ranks get."""

    name = "torchrun"

    def cell(self, code: str, ranks: int, directory: Path) -> str:
        """The script in a file, and the command."""
        script = directory / f"script_{uuid.uuid4().hex[:8]}.py"
        script.write_text(_WHO + code)
        threads = threads_per_rank(len(os.sched_getaffinity(0)), ranks)
        torchrun = f"{sys.executable} -m torch.distributed.run"
        return f"!OMP_NUM_THREADS={threads} {torchrun} --nproc-per-node {ranks} --master-port {free_port()} {script}"


class Accelerate(Tool):
    """``notebook_launcher``: forks the kernel."""

    name = "accelerate"
    module = "accelerate"

    def prepare(self, kernel: BenchKernel, ranks: int) -> None:
        """It imports torch into the kernel."""
        kernel.ok(self.cell("import torch", ranks, kernel.cwd), timeout_s=_READY_S)

    def cell(self, code: str, ranks: int, directory: Path) -> str:  # noqa: ARG002 - needs no file
        """The code as a function."""
        function = "def work():\n" + textwrap.indent(_WHO + code, "    ")
        call = f"notebook_launcher(work, num_processes={ranks}, use_port='{free_port()}')"
        return f"{function}\nfrom accelerate import notebook_launcher\n{call}"


class Ipyparallel(Tool):
    """``%%px`` on a cluster of engines that stay."""

    name = "ipyparallel"
    module = "ipyparallel"
    group = (
        "import os, torch.distributed as dist\n"
        "os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))\n"
        "dist.is_initialized() or dist.init_process_group('gloo')\n"
    )

    def prepare(self, kernel: BenchKernel, ranks: int) -> None:
        """Start the engines."""
        kernel.ok(
            f"import ipyparallel\ncluster = ipyparallel.Cluster(n={ranks})\n"
            "client = cluster.start_and_connect_sync(activate=True)\n"
            f"client[:].scatter('rank', list(range({ranks})), flatten=True, block=True)\n"
            f"client[:].push(dict(world={ranks}, port={free_port()}), block=True)",
            timeout_s=_READY_S,
        )
        kernel.ok(self.cell("import torch", ranks, kernel.cwd), timeout_s=_READY_S)

    def cell(self, code: str, ranks: int, directory: Path) -> str:  # noqa: ARG002 - the engines are there, no file
        """The magic line and the code."""
        return f"%%px --stream\n{code}"


def installed_peers() -> list[Tool]:
    """Tools of ``peers.txt`` that are installed here, besides torchrun."""
    return [tool() for tool in (Ipyparallel, Accelerate) if tool.is_installed()]


@contextmanager
def ready_kernels(tools: Sequence[Tool], ranks: int) -> Iterator[dict[Tool, BenchKernel]]:
    """A kernel for each tool, all ready to measure at once, so that their rounds can be interleaved."""
    with ExitStack() as stack:
        kernels = {tool: stack.enter_context(bench_kernel()) for tool in tools}
        for tool, kernel in kernels.items():
            tool.prepare(kernel, ranks)
        yield kernels
