"""What every test stands on: an environment that is not the user's, and a proof that nothing was left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import zmq

from tests.support.tracked_runs import end_launched_runs

if TYPE_CHECKING:
    from collections.abc import Iterator

_TORCHRUN_VARIABLES = {
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}
_GRACE_S = 3.0  # what the design allows a process tree to die in
_FD_SLACK = 3  # libraries open a few on first use: /dev/urandom, an epoll of a new event loop


@pytest.fixture(scope="session", autouse=True)
def test_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep runs, IPython's profile and the caller's own settings out of the tests; returns AIR_NB_HOME."""
    home = tmp_path_factory.mktemp("air_nb_home")
    # Sockets and GPU locks go to the temporary directory: one for each worker, and short, as a socket's path must be.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="air") as temporary:
        patch.setenv("TMPDIR", temporary)
        patch.setattr(tempfile, "tempdir", temporary)
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        for name in list(os.environ):
            # PYTHONUNBUFFERED would hide a missing flush.
            if name in _TORCHRUN_VARIABLES | {"PYTHONUNBUFFERED"} or name.startswith(("TORCHELASTIC_", "AIR_NB_")):
                patch.delenv(name)
        patch.setenv("AIR_NB_HOME", str(home))
        patch.setenv("AIR_NB_TRACKING", "0")  # MLflow takes seconds to import; tests of tracking switch it on
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        zmq.Context.instance()  # made by the first kernel client otherwise, which would then look like a leak
        yield home


@dataclass(frozen=True, slots=True)
class _Footprint:
    """What this process holds at one moment, and the processes that came from it."""

    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    fds: dict[int, str]

    @classmethod
    def take(cls, home: Path) -> _Footprint:
        return cls(_our_processes(home), frozenset(threading.enumerate()), _open_fds())


@pytest.fixture(autouse=True)
def leaves_nothing_behind(test_environment: Path) -> Iterator[None]:
    """Fail a test that leaves a process, a thread or file descriptors, and end the processes.

    What was there before the test (a kernel of a wider fixture, and whatever lives below it) is that fixture's affair.
    """
    before = _Footprint.take(test_environment)
    yield
    end_launched_runs()
    deadline = time.monotonic() + _GRACE_S
    while (leaks := _leaks(before, _Footprint.take(test_environment))) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    if leaks:
        for process in _new_processes(before, _our_processes(test_environment)):
            _kill(process)
        pytest.fail("left behind after the test:\n  " + "\n  ".join(leaks), pytrace=False)


def _leaks(before: _Footprint, now: _Footprint) -> list[str]:
    leaks = [_describe(process) for process in _new_processes(before, now.processes)]
    leaks += [f"thread {thread.name}" for thread in now.threads - before.threads if _must_end(thread)]
    fds = [f"fd {fd} -> {target}" for fd, target in now.fds.items() if before.fds.get(fd) != target]
    if len(now.fds) > len(before.fds) + _FD_SLACK:
        leaks += fds
    return leaks


def _must_end(thread: threading.Thread) -> bool:
    """Tell whether a thread is one to report: ours always, those of libraries unless they are daemons."""
    return thread.is_alive() and (not thread.daemon or thread.name.startswith("air_nb"))


def _our_processes(home: Path) -> frozenset[psutil.Process]:
    """Find our descendants, those too that lost their parent: by the environment that they were started with."""
    me = psutil.Process()
    mark = f"AIR_NB_HOME={home}\0".encode()
    found = set(me.children(recursive=True))
    for pid in psutil.pids():
        if pid != me.pid and mark in _environment(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add(psutil.Process(pid))
    return frozenset(process for process in found if not _is_excused(process))


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # ended meanwhile, or another user's
        return b""


def _is_excused(process: psutil.Process) -> bool:
    """Tell whether a process may stay: it is dead already, or Python keeps it for itself until this process ends."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE or "multiprocessing.resource_tracker" in " ".join(
            process.cmdline()
        )
    except psutil.Error:
        return True


def _new_processes(before: _Footprint, now: frozenset[psutil.Process]) -> list[psutil.Process]:
    return [process for process in now if not before.processes & {process, *_parents(process)}]


def _parents(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.parents()
    except psutil.Error:
        return []


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} (parent {process.ppid()}): {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"process {process.pid}"


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()
        process.wait(timeout=_GRACE_S)


def _open_fds() -> dict[int, str]:
    fds = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            fds[int(entry.name)] = str(entry.readlink())
        except OSError:  # the listing's own descriptor, closed by now
            continue
    return fds
