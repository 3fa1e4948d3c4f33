"""The kernel's side of the sampling process: starts it, asks it, replaces it when it hangs or dies.

Runs in the kernel on the caller's thread, from any thread; it owns the process and both pipes, starts no thread and
never imports pynvml. Asking is bounded: a driver call that hangs costs the caller `timeout_s` and the sampling process
its life.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Self

from air_nb.monitor.gpu_report import DriverState, GpuReport, utc_now
from air_nb.runs.forked import abandon_in_children
from air_nb.runs.liveness import ProcessId

__all__ = ["Sampler"]

# Initialising a driver without persistence mode takes a second or more per GPU: killing it for that would never end.
_START_TIMEOUT_S = 30.0
_KILL_TIMEOUT_S = 1.0

# -c and an appended path instead of -m: the process finds this very package however the kernel found it, while -P and
# the path's end keep a json.py beside the user's notebook from standing in for the standard library's.
_MAIN = """\
import sys
sys.path.append(sys.argv[1])
from air_nb.monitor.process import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


class Sampler:
    """Samples the GPUs of this machine in a process of its own.

    Answers that can't change while the kernel lives ("no library", "no driver") are kept, so that a launch on a laptop
    never waits for a process. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _SamplingProcess | None = None
        self._hung: subprocess.Popen[bytes] | None = None
        self._last: GpuReport | None = None
        self._closed = False
        abandon_in_children(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process and return, so that the driver is initialised by the time of the first `sample`."""
        if not self._lock.acquire(blocking=False):
            return  # somebody is sampling, so it runs
        try:
            if not self._closed and not self._has_no_gpu():
                self._running()
        except (OSError, _HungError):
            pass  # the next sample meets it again and reports it
        finally:
            self._lock.release()

    def sample(self, timeout_s: float = 2.0) -> GpuReport:
        """Sample all GPUs now.

        Args:
            timeout_s: The longest wait. A process that has answered before is then killed and the next call starts
                another; one that still initialises the driver gets 30 s, over several calls if need be.

        Returns:
            What the driver says. Its state is TIMEOUT or ERROR if there was no answer; it then has the GPUs and the
            time of the last good sample, and no GPUs if there was none.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(timeout_s, 0)):
            return self._without_answer(DriverState.TIMEOUT, f"the driver has not answered within {timeout_s:g} s")
        try:
            return self._sample(deadline, timeout_s)
        except OSError as error:
            return self._without_answer(DriverState.ERROR, f"the sampling process can't be started: {error}")
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the process. Waits at most for a `sample` of another thread and one second more; can be called twice."""
        self._closed = True
        with self._lock:
            self._drop()

    def abandon(self) -> None:
        """In a forked child: close the pipes and forget the process, which is the parent's."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._closed = True
        if self._process is not None:
            self._process.close_pipes()
            self._process = None

    def _sample(self, deadline: float, timeout_s: float) -> GpuReport:
        if self._closed:
            return self._without_answer(DriverState.ERROR, "the sampler was closed")
        if self._last is not None and self._has_no_gpu():
            return replace(self._last, at=utc_now())
        ending = ""
        for _attempt in range(2):  # one that was killed while idle is replaced without a word
            try:
                report = self._ask(deadline)
            except (EOFError, BrokenPipeError):
                ending = self._drop()
                continue
            except _HungError as hung:
                return self._without_answer(DriverState.TIMEOUT, str(hung))
            return report if report is not None else self._give_up(timeout_s)
        return self._without_answer(DriverState.ERROR, f"the sampling process ended: {ending}")

    def _ask(self, deadline: float) -> GpuReport | None:
        report = self._running().ask(deadline)
        if report is not None and report.driver_state is not DriverState.ERROR:
            self._last = report
        if self._has_no_gpu():
            self._drop()  # it would answer the same for ever
        if report is not None and report.driver_state is DriverState.ERROR:
            return self._without_answer(DriverState.ERROR, report.reason or "NVML failed")
        return report

    def _running(self) -> _SamplingProcess:
        if self._hung is not None:
            if self._hung.poll() is None:
                advice = "it can't be killed before the driver lets go of it; a reboot may be needed"
                raise _HungError(f"process {self._hung.pid} is stuck in the NVIDIA driver: {advice}")
            self._hung = None
        if self._process is None:
            self._process = _SamplingProcess()
        return self._process

    def _give_up(self, timeout_s: float) -> GpuReport:
        assert self._process is not None, "there was one to wait for"
        age_s = self._process.age_s()
        if not self._process.answered and age_s < _START_TIMEOUT_S:
            return self._without_answer(
                DriverState.TIMEOUT, f"the NVIDIA driver is still starting, for {age_s:.0f} s now"
            )
        self._drop()
        return self._without_answer(DriverState.TIMEOUT, f"the NVIDIA driver did not answer within {timeout_s:g} s")

    def _drop(self) -> str:
        """End the process if there is one; says how it ended."""
        if self._process is None:
            return "it was not running"
        process, self._process = self._process, None
        ending = process.kill()
        if process.popen.returncode is None:
            self._hung = process.popen
        return ending

    def _has_no_gpu(self) -> bool:
        final = (DriverState.NO_LIBRARY, DriverState.NO_DRIVER)
        return self._last is not None and self._last.driver_state in final

    def _without_answer(self, state: DriverState, reason: str) -> GpuReport:
        last = self._last
        if last is None:
            return GpuReport(utc_now(), state, reason)
        return replace(last, driver_state=state, reason=reason)


class _HungError(Exception):
    """A killed process still has not gone: starting more of them would only collect more."""


class _SamplingProcess:
    """One sampling process, its pipes and what has been read of a reply."""

    def __init__(self) -> None:
        self.answered = False
        self._started_at = time.monotonic()
        self._number = 0
        self._unread = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the pipes
        ours, theirs = os.pipe(), os.pipe()
        self._requests, self._replies = ours[1], theirs[0]
        try:
            self.popen = self._start(ours[0], theirs[1])
        except OSError:
            self.close_pipes()
            raise
        finally:
            os.close(ours[0])
            os.close(theirs[1])

    def _start(self, stdin: int, stdout: int) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[2])
        kernel = ProcessId.own()
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, root, str(kernel.pid), str(kernel.started_ticks)],
            stdin=stdin,
            stdout=stdout,
            stderr=self._stderr,
            cwd="/",  # not the notebook's folder, which it would keep from being unmounted
            start_new_session=True,  # Jupyter's interrupt and restart signal the kernel's process group
        )

    def age_s(self) -> float:
        return time.monotonic() - self._started_at

    def ask(self, deadline: float) -> GpuReport | None:
        """Ask for a sample and wait for it.

        Args:
            deadline: Time of `time.monotonic` at which waiting ends.

        Returns:
            None at the deadline.

        Raises:
            EOFError, BrokenPipeError: if the process has ended.
        """
        self._number += 1
        os.write(self._requests, b"%d\n" % self._number)
        while (line := self._read_line(deadline)) is not None:
            reply = json.loads(line)
            self.answered = True
            if reply["number"] == self._number:  # earlier ones belong to calls that no longer wait
                return GpuReport.from_json(reply["report"])
        return None

    def _read_line(self, deadline: float) -> bytes | None:
        readable = select.poll()
        readable.register(self._replies, select.POLLIN)
        while b"\n" not in self._unread:
            if not readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            received = os.read(self._replies, 65536)
            if not received:
                raise EOFError
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def kill(self) -> str:
        """End it, within a second even if the driver holds it; says how it ended and its last words."""
        self.popen.kill()
        # One that sits in a driver call that can't be interrupted outlives its kill: no wait for ever.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(_KILL_TIMEOUT_S)
        words = self._last_words()
        self.close_pipes()
        return f"exit status {self.popen.returncode}{words}"

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read()[-4096:].decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" ({last})" if last else ""

    def close_pipes(self) -> None:
        os.close(self._requests)
        os.close(self._replies)
        self._stderr.close()
