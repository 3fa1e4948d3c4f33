"""The kernel's end of a launcher: starts the process, sends commands, hands each run its events.

A reader thread (``air_nb-launcher``, owned by the ``LauncherClient``) takes lines from the launcher and puts them into the
run they belong to; whoever waits for the run is woken through a pipe. It ends when the launcher's stdout does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from air_nb.errors import LauncherError
from air_nb.launch.key import LauncherKey, current_key
from air_nb.protocol.messages import PROTOCOL_VERSION, Done, Exited, Ready, Refused, Retire, Run, Started, decode, encode
from air_nb.runs.liveness import ProcessId
from air_nb.runs.paths import node_local, private_directory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from air_nb.protocol.messages import Command

__all__ = ["LauncherClient", "RunEvents"]

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from air_nb.launch.launcher import main; main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"
)
_LOG_TAIL_BYTES = 4000


class RunEvents:
    """Events of one run, from the reader thread to the thread that waits; ``reader`` becomes readable with each."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._events: deque[Started | Exited | Done | Refused] = deque()

    def put(self, event: Started | Exited | Done | Refused) -> None:
        """Add an event and wake the waiter."""
        self._events.append(event)
        self.wake()

    def wake(self) -> None:
        """Wake the waiter; also from a signal handler."""
        with suppress(BlockingIOError):  # it has plenty to wake up for already
            os.write(self._writer, b"!")

    def take(self) -> list[Started | Exited | Done | Refused]:
        """All events so far."""
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def drain(self) -> None:
        """Empty the wake-up pipe."""
        os.read(self.reader, 4096)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.reader)
        os.close(self._writer)


class LauncherClient:
    """A launcher process.

    Args:
        environ: Environment that it starts with.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.key: LauncherKey = current_key(environ)
        self.ready: Ready | None = None
        self._runs: dict[str, RunEvents] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ended = False
        sweep_dead_launchers()
        self._directory = private_directory(node_local() / f"launcher-{os.getpid()}-{time.monotonic_ns()}")
        self._process = self._start(environ)
        self._reader = threading.Thread(target=self._read, name="air_nb-launcher", daemon=True)
        self._reader.start()

    def _start(self, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        kernel = ProcessId.own()
        path = [entry for entry in sys.path if entry]
        arguments = [json.dumps(path), str(kernel.pid), str(kernel.started_ticks), str(self._directory)]
        # OpenBLAS would start its threads at import, in the process that ranks are forked from; ranks set their own count.
        env = {"OPENBLAS_NUM_THREADS": "1", **environ}
        env.pop("PYTHONSTARTUP", None)
        with open(self._log_path(), "wb") as log:  # noqa: PTH123
            return subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, "-P", "-c", _BOOT, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                cwd="/",
                start_new_session=True,  # Jupyter's Interrupt and Restart signal the kernel's whole process group
            )

    def _log_path(self) -> Path:
        return self._directory / "launcher.log"

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can take runs."""
        return not self._ended and self._process.poll() is None

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until it is warm.

        Returns:
            False if the time is up first.

        Raises:
            LauncherError: It ended, or can't be used; the message says why.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.ready is not None or self._ended, timeout=timeout_s)
        if self.ready is not None and self.ready.problem is None and not self._ended:
            return True
        if self._ended:
            msg = f"the launcher process ended.\n{self.log_tail()}\nRun the cell again: a new one is started."
            raise LauncherError(msg)
        if self.ready is not None:
            msg = f"no rank can be started: {self.ready.problem}"
            raise LauncherError(msg)
        return False

    def run(self, run: Run) -> RunEvents:
        """Start a run; its events come to the returned object."""
        events = RunEvents()
        with self._lock:
            self._runs[run.run_id] = events
        self.send(run)
        return events

    def forget(self, run_id: str) -> None:
        """The run has ended: no more events are wanted."""
        with self._lock:
            events = self._runs.pop(run_id, None)
        if events is not None:
            events.close()

    def send(self, command: Command) -> None:
        """Send a command; a launcher that is gone has its end reported to every run instead."""
        stdin = self._process.stdin
        assert stdin is not None
        with self._lock:
            try:
                stdin.write(encode(command))
                stdin.flush()
            except (BrokenPipeError, ValueError):
                return

    def retire(self) -> None:
        """Let it end when its last run does."""
        self.send(Retire())

    def kill(self) -> None:
        """End it now; lifelines end everything below it."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close its lifeline, and wait until it and everything below it is gone (bounded)."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait(timeout=3)
        self._reader.join(timeout=3)

    def abandon(self) -> None:
        """In a forked child of the kernel: let go of the launcher's pipes."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    os.close(pipe.fileno())

    def log_tail(self) -> str:
        """End of what it wrote to stderr."""
        try:
            data = self._log_path().read_bytes()
        except FileNotFoundError:
            data = b""
        return (self._last_log or data)[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()

    _last_log = b""

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        for line in stdout:
            try:
                self._deliver(decode(line))
            except ValueError as error:
                sys.stderr.write(f"air_nb: {error}\n")
        stdout.close()
        self._process.wait()
        with suppress(FileNotFoundError):
            self._last_log = self._log_path().read_bytes()
        self._finish()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _deliver(self, event: object) -> None:
        match event:
            case Ready():
                if event.version != PROTOCOL_VERSION:
                    event = Ready(
                        event.version, event.pid, event.forkserver_pid, event.warm_s,
                        "air_nb on disk is another version than the one that this kernel has imported: restart the kernel",
                    )
                with self._changed:
                    self.ready = event
                    self._changed.notify_all()
            case Started() | Exited() | Done() | Refused():
                with self._lock:
                    events = self._runs.get(event.run_id)
                if events is not None:
                    events.put(event)

    def _finish(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            for run_id, events in self._runs.items():
                events.put(Refused(run_id, "the launcher process ended while the run was on"))


def sweep_dead_launchers() -> None:
    """Delete directories of launchers whose kernel is gone and that could not do it themselves (SIGKILL)."""
    for path in node_local().glob("launcher-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and ProcessId.of(int(pid)) is None:
            shutil.rmtree(path, ignore_errors=True)
