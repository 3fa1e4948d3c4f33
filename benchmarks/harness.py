"""A real kernel whose processes can all be found, and when what it shows reached the client."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.kernel import Cell, Kernel, plain

__all__ = ["BenchKernel", "Cell", "Deaths", "arrivals", "bench_kernel", "clean_environment", "free_port", "settle"]

_SETTINGS = ("AIR_NB_", "MLFLOW_", "TORCHELASTIC_")
_MARK = "AIR_NB_BENCHMARK"
_SETTLE_S = 0.7
_SETTLED_SHARE = 0.03  # of a core


class BenchKernel(Kernel):
    """A kernel in a directory of its own, with a mark in its environment that all of its processes inherit."""

    def __init__(self, cwd: Path, env: dict[str, str]) -> None:
        mark = uuid.uuid4().hex
        self._mark = f"{_MARK}={mark}".encode()
        self.home = cwd / "air_nb"
        super().__init__(cwd, {"AIR_NB_HOME": str(self.home), "IPYTHONDIR": str(cwd / "ipython"), _MARK: mark, **env})

    def processes(self) -> list[int]:
        """Living processes that came from this kernel, whoever their parent is now; without the kernel."""
        return [pid for pid in psutil.pids() if pid != self.pid and self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes() and _is_alive(pid)
        except OSError:  # ended meanwhile, or another user's
            return False

    def memory_mb(self, key: str) -> float:
        """``VmRSS`` or ``VmHWM`` of the kernel in MB (10^6 bytes)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise KeyError(key)

    def reset_peak(self) -> None:
        """Let ``VmHWM`` start again from here."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def last_run(self) -> Path:
        """Directory of the newest run of air_nb."""
        return max((self.home / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)

    def close(self) -> None:
        """Shut down, and end what the tool under test left behind: only processes with this kernel's mark."""
        super().close()
        end = time.monotonic() + 5
        while (left := self.processes()) and time.monotonic() < end:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def _is_alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state not in ("Z", "X")


@contextmanager
def bench_kernel(env: dict[str, str] | None = None) -> Iterator[BenchKernel]:
    """A fresh kernel, gone with all of its processes and files at the end."""
    with tempfile.TemporaryDirectory(prefix="air_nb_bench_", ignore_cleanup_errors=True) as directory:
        kernel = BenchKernel(Path(directory), env or {})
        try:
            yield kernel
        finally:
            kernel.close()


def arrivals(cell: Cell, pattern: re.Pattern[str]) -> dict[str, float]:
    """When each distinct match was first at the client (monotonic clock); the pattern must lie within one line."""
    found: dict[str, float] = {}
    unfinished = ""
    for at, message in cell.messages:
        if message["msg_type"] == "stream":
            text = unfinished + plain(message["content"]["text"])
            unfinished = text[text.rfind("\n") + 1 :]
        else:
            text = _shown(message)
        for match in pattern.finditer(text):
            found.setdefault(match.group(), at)
    return found


def _shown(message: dict[str, Any]) -> str:
    content = message["content"]
    match message["msg_type"]:
        case "display_data" | "update_display_data" | "execute_result":
            return plain(str(content["data"].get("text/plain", "")))
        case "error":
            return plain("\n".join(content["traceback"]))
        case _:
            return ""


class Deaths:
    """Watches processes end, in a thread of its own; no polling, so that the time is exact.

    Args:
        pids: Processes; those already gone count as ended now.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self.ended_at: dict[int, float] = {}
        self._pidfds: dict[int, int] = {}
        for pid in pids:
            try:
                self._pidfds[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                self.ended_at[pid] = time.monotonic()
        self._all_gone = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="benchmarks-deaths", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in self._pidfds:
            poll.register(descriptor, select.POLLIN)
        while self._pidfds and not self._stop.is_set():
            for descriptor, _ in poll.poll(100):
                self.ended_at[self._pidfds.pop(descriptor)] = time.monotonic()
                poll.unregister(descriptor)
                os.close(descriptor)
        for descriptor in self._pidfds:
            os.close(descriptor)
        if not self._pidfds:
            self._all_gone.set()

    def last_at(self, timeout_s: float) -> float | None:
        """When the last one ended, None if not all have within the time; ends the watching."""
        gone = self._all_gone.wait(timeout_s)
        self._stop.set()
        self._thread.join(timeout=5)
        return max(self.ended_at.values()) if gone else None


def settle(kernel: BenchKernel, timeout_s: float = 60.0) -> None:
    """Wait until the kernel and everything below it does nothing, such as warming up in the background."""
    end = time.monotonic() + timeout_s
    quiet, before = 0, _cpu_seconds(kernel)
    while quiet < 2 and time.monotonic() < end:  # noqa: PLR2004 - one quiet moment may be a wait for the disk
        time.sleep(_SETTLE_S)
        now = _cpu_seconds(kernel)
        quiet = quiet + 1 if now - before < _SETTLED_SHARE * _SETTLE_S else 0
        before = now


def _cpu_seconds(kernel: BenchKernel) -> float:
    total = 0.0
    for pid in (kernel.pid, *kernel.processes()):
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def free_port() -> int:
    """A TCP port that was free a moment ago, for tools that must be told one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environment() -> None:
    """Take out what would change the tools under test: the caller's own variables for them, forced unbuffering."""
    torchrun = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in list(os.environ):
        if name in (*torchrun, "OMP_NUM_THREADS", "PYTHONUNBUFFERED") or name.startswith(_SETTINGS):
            del os.environ[name]
