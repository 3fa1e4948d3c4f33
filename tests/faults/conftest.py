"""Kernels whose every process can be found again, orphans too: by a tag in the environment that all inherit."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from air_nb.runs.directory import all_runs
from tests.support.kernel import Cell, Kernel, running_kernel

PROGRAMS = Path(__file__).parent / "programs"
_TAG = "AIR_NB_FAULT_TAG"

_SESSION = "__import__('air_nb.session.session').session.session.get_session()"


class TaggedKernel:
    """A kernel and everything that came from it."""

    def __init__(self, kernel: Kernel, tag: str) -> None:
        self.kernel = kernel
        self.run = kernel.run
        self.ok = kernel.ok
        self.start = kernel.start
        self.follow = kernel.follow
        self._tag = f"{_TAG}={tag}".encode()

    def value(self, expression: str) -> str:
        return self.kernel.value(f"({expression})")

    def processes(self) -> list[psutil.Process]:
        """All living processes that were started with the kernel's environment, the kernel itself included."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            return self._tag in environ.split(b"\0") and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.Error):
            return False

    def launcher(self) -> psutil.Process:
        return psutil.Process(int(self.value(f"{_SESSION}.launcher.pid")))

    def forkserver(self) -> psutil.Process:
        expression = f"{_SESSION}.launcher.ready.forkserver_pid"
        return psutil.Process(int(self.value(expression)))

    def below_forkserver(self) -> list[psutil.Process]:
        """Ranks and whatever they left."""
        return [child for child in self.forkserver().children(recursive=True) if child.status() != "zombie"]

    def last_record(self) -> dict[str, str]:
        pid = self.kernel.pid
        record = next(record for _, record in all_runs() if record.kernel is not None and record.kernel.pid == pid)
        return {"state": str(record.state), "reason": record.reason, "run_id": record.run_id}

    def interrupt_when_shown(
        self, code: str, text: str, *, times: int = 1, timeout_s: float = 60.0
    ) -> tuple[Cell, float]:
        """Run a cell, interrupt it once the text has been shown; the cell, and seconds from interrupt to its end."""
        cell = self.start(code)
        self.follow(cell, until=lambda cell: text in cell.text, timeout_s=timeout_s)
        assert not cell.idle_at, cell.text
        interrupted_at = time.monotonic()
        for _ in range(times):
            self.kernel.interrupt()
            time.sleep(0.2 if times > 1 else 0)
        self.follow(cell, timeout_s=timeout_s)
        return cell, cell.idle_at - interrupted_at


def new_kernel(cwd: Path, *, load: bool = True) -> Iterator[TaggedKernel]:
    tag = uuid.uuid4().hex
    with running_kernel(cwd, load=load, env={_TAG: tag}) as kernel:
        yield TaggedKernel(kernel, tag)


@pytest.fixture
def cold_kernel(tmp_path: Path) -> Iterator[TaggedKernel]:
    """A kernel of this test's own, whose launcher is warming up."""
    yield from new_kernel(tmp_path)


@pytest.fixture
def fresh_kernel(tmp_path: Path) -> Iterator[TaggedKernel]:
    """A kernel of this test's own, with a warm launcher."""
    for kernel in new_kernel(tmp_path):
        kernel.ok("%%distributed --nproc 1 --quiet\npass")
        yield kernel


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaggedKernel]:
    """A kernel that tests share which leave it as it was."""
    yield from new_kernel(tmp_path_factory.mktemp("kernel"))


@pytest.fixture
def programs(kernel: TaggedKernel) -> Path:
    kernel.ok(f"PROGRAMS = {os.fspath(PROGRAMS)!r}")
    return PROGRAMS
