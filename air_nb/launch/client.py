"""The kernel's end of a launcher: starts the process, sends commands, hands each run its events.

A reader thread (``air_nb-launcher``, owned by the ``LauncherClient``) takes lines from the launcher and puts them into
the run they belong to; whoever waits for the run is woken through a pipe. It ends when the launcher's stdout does. Both
pipes are raw: a buffered file has a lock, which a forked child of the kernel could find held for ever.
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
from dataclasses import replace
from typing import TYPE_CHECKING

from air_nb.errors import LauncherError
from air_nb.launch.failures import describe_exit
from air_nb.launch.key import LauncherKey, current_key
from air_nb.protocol.messages import (
    PROTOCOL_VERSION,
    Done,
    Exited,
    Ready,
    Refused,
    Retire,
    Run,
    Started,
    decode,
    encode,
)
from air_nb.runs.forked import abandon_in_children
from air_nb.runs.liveness import ProcessId
from air_nb.runs.paths import node_local, private_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from air_nb.protocol.messages import Command

__all__ = ["LauncherClient", "RunEvents"]

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from air_nb.launch.launcher import main; main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"
)
_LOG_TAIL_BYTES = 4000
_READ_BYTES = 1 << 16
_RANKS_END_S = 5.0


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
        self._ranks: dict[str, list[ProcessId]] = {}
        self._users = 0
        self._retired = False
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._ended = False
        self._last_words = ""
        try:
            sweep_dead_launchers()
            self._directory = private_directory(node_local() / f"launcher-{os.getpid()}-{time.monotonic_ns()}")
            # Held open: the launcher deletes the directory when it ends, and its last words are wanted then.
            self._log = (self._directory / "launcher.log").open("w+b")
        except OSError as error:
            msg = f"no directory for the launcher's sockets: {error}. Make room there, or set XDG_RUNTIME_DIR or TMPDIR"
            raise LauncherError(msg) from error
        try:
            self._process = self._start(environ)
        except OSError as error:
            self._log.close()
            shutil.rmtree(self._directory, ignore_errors=True)
            raise LauncherError(f"the launcher process can't be started: {error}") from error
        abandon_in_children(self)
        self._reader = threading.Thread(target=self._read, name="air_nb-launcher", daemon=True)
        self._reader.start()

    def _start(self, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        kernel = ProcessId.own()
        path = [entry for entry in sys.path if entry]
        arguments = [json.dumps(path), str(kernel.pid), str(kernel.started_ticks), str(self._directory)]
        # OpenBLAS would start threads at import, in the process that ranks are forked from; ranks set their own count.
        env = {"OPENBLAS_NUM_THREADS": "1", **environ}
        env.pop("PYTHONSTARTUP", None)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, *arguments],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=env,
            cwd="/",
            start_new_session=True,  # Jupyter's Interrupt and Restart signal the kernel's whole process group
        )

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return not self._ended and self._process.poll() is None

    @property
    def problem(self) -> str | None:
        """Why no rank can be started from it, if so."""
        return self.ready.problem if self.ready is not None else None

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until it is warm.

        Returns:
            False if the time is up first.

        Raises:
            LauncherError: It ended, or can't be used; the message says why.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.ready is not None or self._ended, timeout=timeout_s)
        if self._ended:
            how = describe_exit(self._process.returncode)
            raise LauncherError(
                f"the launcher process {how}; the next cell starts a new one.\n{self.log_tail()}".strip()
            )
        if self.problem is not None:
            raise LauncherError(f"no rank can be started: {self.problem}")
        return self.ready is not None

    def borrow(self) -> None:
        """Keep it from retiring until ``give_back``."""
        with self._changed:
            self._users += 1

    def give_back(self) -> None:
        """Undo one ``borrow``."""
        with self._changed:
            self._users -= 1
            over = self._retired and not self._users
        if over:
            self.send(Retire())

    def retire(self) -> None:
        """Let it end when nobody uses it any more."""
        with self._changed:
            self._retired = True
            over = not self._users
        if over:
            self.send(Retire())

    def run(self, run: Run) -> RunEvents:
        """Start a run; its events come to the returned object."""
        events = RunEvents()
        with self._changed:
            self._runs[run.run_id] = events
            if self._ended:
                self._refuse(run.run_id)
        self.send(run)
        return events

    def forget(self, run_id: str) -> None:
        """The run has ended: no more events are wanted."""
        with self._changed:
            self._ranks.pop(run_id, None)
            events = self._runs.pop(run_id)
            events.close()

    def send(self, command: Command) -> None:
        """Send a command; a launcher that is gone has its end reported to every run instead."""
        assert self._process.stdin is not None
        data = encode(command)
        with self._send_lock, suppress(BrokenPipeError, ValueError):
            while data:
                data = data[self._process.stdin.write(data) :]

    def kill(self) -> None:
        """End it now; lifelines end everything below it."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close its lifeline, and wait until it and everything below it is gone (bounded)."""
        assert self._process.stdin is not None
        with self._send_lock:
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
                pipe.close()
        self._ended = True

    def log_tail(self) -> str:
        """End of what it wrote to stderr."""
        if self._log.closed:
            return self._last_words
        size = os.fstat(self._log.fileno()).st_size
        start = max(0, size - _LOG_TAIL_BYTES)
        return os.pread(self._log.fileno(), size - start, start).decode(errors="replace").strip()

    def _read(self) -> None:
        for line in self._lines():
            try:
                self._deliver(decode(line))
            except ValueError as error:
                sys.stderr.write(f"air_nb: {error}\n")
        self._process.wait()
        self._last_words = self.log_tail()
        self._log.close()
        self._wait_for_ranks()
        shutil.rmtree(self._directory, ignore_errors=True)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            for run_id in self._runs:
                self._refuse(run_id)
        assert self._process.stdin is not None
        with self._send_lock:
            self._process.stdin.close()

    def _lines(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            buffer = b""
            while data := stdout.read(_READ_BYTES):
                *lines, buffer = (buffer + data).split(b"\n")
                yield from lines

    def _deliver(self, event: object) -> None:
        with self._changed:
            match event:
                case Ready():
                    self.ready = _checked(event)
                    self._changed.notify_all()
                case Started() | Exited() | Done() | Refused():
                    if isinstance(event, Started):
                        ranks = map(ProcessId.of, event.pids)
                        self._ranks[event.run_id] = [rank for rank in ranks if rank is not None]
                    if event.run_id in self._runs:
                        self._runs[event.run_id].put(event)

    def _refuse(self, run_id: str) -> None:
        how = describe_exit(self._process.returncode)
        self._runs[run_id].put(Refused(run_id, self.problem or f"the launcher process {how} while the run was on"))

    def _wait_for_ranks(self) -> None:
        """Its lifelines are ending the ranks: the runs are over when none is left."""
        with self._changed:
            ranks = [rank for run in self._ranks.values() for rank in run]
        end = time.monotonic() + _RANKS_END_S
        while any(rank.is_alive() for rank in ranks) and time.monotonic() < end:
            time.sleep(0.02)


def _checked(ready: Ready) -> Ready:
    if ready.version == PROTOCOL_VERSION:
        return ready
    problem = "air_nb on disk is another version than the one that this kernel has imported: restart the kernel"
    return replace(ready, problem=problem)


def sweep_dead_launchers() -> None:
    """Delete directories of launchers whose kernel is gone and that could not do it themselves (SIGKILL)."""
    for path in node_local().glob("launcher-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and ProcessId.of(int(pid)) is None:
            shutil.rmtree(path, ignore_errors=True)
