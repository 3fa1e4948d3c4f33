"""The kernel's end of the tracking process: starts it, tells it of runs, starts another one if it has died.

What becomes of a run is in its directory, not here. A reader thread (``air_nb-tracking``, owned by the client) takes
the process's few messages and notices its end; it ends with the process. Nothing here imports MLflow, or waits for it
except where a method says so.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from air_nb.protocol.tracking import TRACKED_FILE, TrackedRun, TrackedState
from air_nb.runs.directory import locate
from air_nb.runs.forked import abandon_in_children
from air_nb.runs.liveness import ProcessId
from air_nb.runs.paths import home
from air_nb.runs.unsent import read_tracked
from air_nb.tracking.messages import TRACKING_VERSION, Begin, End, Finish, Finished, Message, Ready, decode, encode
from air_nb.tracking.tracked_file import read_request

__all__ = ["TrackingClient"]

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from air_nb.tracking.process import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
_LOG_FILE = "tracking.log"
_READ_BYTES = 1 << 16
_SEND_S = 2.0  # it reads at once, always: one that does not is stuck
_GIVE_UP_S = 1.0
_POLL_S = 0.02
_CLOSE_S = 3.0
_MAX_REVIVALS = 3  # in a row, so that one that dies of what it does does not do it for ever


@dataclass(slots=True)
class _OpenRun:
    """A run that the process has to look after; said again to its successor."""

    begin: Begin
    ended_at: float | None = None


class TrackingClient:
    """See the module. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._process: _Process | None = None
        self._ready: Ready | None = None
        self._open: dict[str, _OpenRun] = {}
        self._outcomes: dict[int, dict[str, str]] = {}
        self._numbers = 0
        self._revivals = 0
        self._closed = False
        abandon_in_children(self)

    @property
    def pid(self) -> int | None:
        """Pid of the process; None if there is none."""
        process = self._process
        return None if process is None else process.popen.pid

    def start(self) -> None:
        """Start the process, if there is none; it imports MLflow in the background."""
        with self._changed, suppress(OSError):  # the first run says what is wrong
            self._ensure()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the process has imported MLflow; False if the time is up first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ready is not None, timeout_s)

    def begin(self, directory: Path, env: Mapping[str, str]) -> None:
        """Have a run tracked from now on; returns at once.

        Args:
            directory: Run directory, with ``tracking.json`` and ``run.json``.
            env: Environment of the kernel; the process takes it over.
        """
        begin = Begin(str(directory), dict(env))
        with self._changed:
            self._forget_ended()
            self._revivals = 0
            self._open[directory.name] = _OpenRun(begin)
            problem = self._deliver(begin)
        if problem is not None:
            _write_problem(directory, problem)

    def end(self, directory: Path) -> None:
        """Have the rest sent, and the MLflow run ended as ``run.json`` says, which is final; returns at once."""
        with self._changed:
            run = self._open.get(directory.name)
            if run is None:
                return
            run.ended_at = time.monotonic()
            problem = self._deliver(End(str(directory)))
        if problem is not None:
            _write_problem(directory, problem)

    def wait_ended(self, directory: Path, timeout_s: float) -> bool:
        """Wait after ``end``.

        Returns:
            Whether there is nothing more to wait for: all was sent, or there is a problem and it was tried again
            after the end.
        """
        deadline = time.monotonic() + timeout_s
        run = self._open.get(directory.name)
        if run is None or run.ended_at is None:
            return True
        while True:
            tracked = read_tracked(directory)
            if tracked is not None:
                gave_up = tracked.problem is not None and time.monotonic() - run.ended_at > _GIVE_UP_S
                if tracked.state is TrackedState.ENDED or gave_up:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)

    def wait_all_ended(self, timeout_s: float) -> None:
        """Wait for all runs after ``end``, for those too that waited for MLflow's first import."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            directories = [] if self._closed else [Path(run.begin.directory) for run in self._open.values()]
        for directory in directories:
            self.wait_ended(directory, deadline - time.monotonic())

    def finish(self, directories: list[Path], env: Mapping[str, str], timeout_s: float) -> dict[str, str]:
        """Send what runs of the past have not sent yet, and end them in MLflow; waits for it.

        Args:
            directories: Run directories.
            env: Environment of the kernel.
            timeout_s: The longest wait.

        Returns:
            By run id, one sentence on what came of it.
        """
        run_ids = [directory.name for directory in directories]
        with self._changed:
            self._numbers += 1
            number = self._numbers
            outcomes = self._outcomes[number] = {}
            problem = self._deliver(Finish(number, [str(directory) for directory in directories], dict(env)))
            process = self._process
            if problem is None:
                self._changed.wait_for(lambda: len(outcomes) == len(run_ids) or self._process is not process, timeout_s)
                is_lost = self._process is not process
                problem = "the tracking process has died" if is_lost else f"no answer in {timeout_s:g} s"
            del self._outcomes[number]
        return {run_id: outcomes.get(run_id, f"not sent: {problem.rstrip('.')}.") for run_id in run_ids}

    def close(self) -> None:
        """End the process: it finishes what is open, within three seconds."""
        with self._changed:
            self._closed = True
            process, self._process = self._process, None
            self._open.clear()
        if process is not None:
            process.close()

    def abandon(self) -> None:
        """In a forked child of the kernel: let go of the process, which is the parent's."""
        self._changed = threading.Condition()  # another thread of the parent may have held it
        self._closed = True
        if self._process is not None:
            self._process.close_pipes()
            self._process = None

    # -- with the lock held ------------------------------------------------------------------------------------------

    def _deliver(self, message: Message) -> str | None:
        """Send a message, to a new process if need be; says why that failed, if so."""
        if self._closed:
            return "the session was closed"
        if self._ready is not None and self._ready.version != TRACKING_VERSION:
            return "air_nb on disk is another version than the one that this kernel has imported: restart the kernel"
        for _attempt in range(2):
            try:
                is_new = self._ensure()
                assert self._process is not None
                if not (is_new and isinstance(message, (Begin, End))):
                    self._process.send(message)
            except BrokenPipeError:
                self._process = None
                continue
            except OSError as error:
                return f"the tracking process can't be reached: {error}"
            return None
        return "the tracking process died twice in a row"

    def _ensure(self) -> bool:
        """See that there is a process; a new one (True) is told of all open runs."""
        if self._process is not None and self._process.popen.poll() is None:
            return False
        if self._closed:
            return False
        self._ready = None
        self._process = _Process()
        thread = threading.Thread(target=self._read, args=(self._process,), name="air_nb-tracking", daemon=True)
        self._process.reader = thread
        thread.start()
        for run in self._open.values():
            self._process.send(run.begin)
            if run.ended_at is not None:
                self._process.send(End(run.begin.directory))
        return True

    def _forget_ended(self) -> None:
        for run_id, run in list(self._open.items()):
            if run.ended_at is not None and _has_ended(Path(run.begin.directory)):
                del self._open[run_id]

    # -- the reader's thread -----------------------------------------------------------------------------------------

    def _read(self, process: _Process) -> None:
        for message in process.messages():
            with self._changed:
                match message:
                    case Ready():
                        self._ready = message
                    case Finished(number, run_id, outcome) if number in self._outcomes:
                        self._outcomes[number][run_id] = outcome
                self._changed.notify_all()
        status = process.popen.wait()
        process.close_pipes()
        with self._changed:
            if self._process is process:
                self._process = None
                self._forget_ended()
                if self._open:
                    self._revive(status)
            self._changed.notify_all()

    def _revive(self, status: int) -> None:
        self._revivals += 1
        if self._revivals <= _MAX_REVIVALS:
            with suppress(OSError):  # the next begin or end meets it again
                self._ensure()
            return
        problem = f"the tracking process died again and again (exit status {status}); {home() / _LOG_FILE} may say why"
        for run in self._open.values():
            _write_problem(Path(run.begin.directory), problem)


class _Process:
    """One tracking process and its pipes, which are raw: a buffered file has a lock that a fork could leave held."""

    def __init__(self) -> None:
        self.reader: threading.Thread | None = None
        kernel = ProcessId.own()
        path = [entry for entry in sys.path if entry]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONSTARTUP"}
        log = _open_log()
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(path), str(kernel.pid), str(kernel.started_ticks)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={"OPENBLAS_NUM_THREADS": "1", **env},
                cwd="/",  # not the notebook's folder, which it would keep from being unmounted
                start_new_session=True,  # Jupyter's interrupt and restart signal the kernel's process group
            )
        finally:
            os.close(log)
        assert self.popen.stdin is not None
        os.set_blocking(self.popen.stdin.fileno(), False)

    def send(self, message: Message) -> None:
        """Write a message.

        Raises:
            BrokenPipeError: It has died.
            TimeoutError: It does not read, and was killed.
        """
        assert self.popen.stdin is not None
        pipe = self.popen.stdin.fileno()
        data = encode(message)
        deadline = time.monotonic() + _SEND_S
        while data:
            try:
                data = data[os.write(pipe, data) :]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self.popen.kill()
                    raise TimeoutError(f"it has not read for {_SEND_S:g} s and was killed") from None
                select.select([], [pipe], [], 0.1)

    def messages(self) -> Iterator[Message]:
        """What it says, until it ends."""
        assert self.popen.stdout is not None
        buffer = b""
        while data := self.popen.stdout.read(_READ_BYTES):
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                with suppress(ValueError):  # of another version, which its first line says
                    yield decode(line)

    def close(self) -> None:
        """Close its lifeline, and wait until it is gone (bounded)."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        try:
            self.popen.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(_CLOSE_S)
        if self.reader is not None:
            self.reader.join(_CLOSE_S)

    def close_pipes(self) -> None:
        """Let go of it."""
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


def _open_log() -> int:
    """What the process and MLflow have to complain of: one file for all kernels, which the process keeps small."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(home() / _LOG_FILE, flags, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _has_ended(directory: Path) -> bool:
    """Whether MLflow has everything; of a run directory that was deleted, nothing more can be had."""
    tracked = read_tracked(directory)
    return not locate(directory).path.exists() if tracked is None else tracked.state is TrackedState.ENDED


def _write_problem(directory: Path, problem: str) -> None:
    """Say in the process's place that it can't be asked."""
    with suppress(OSError, ValueError):  # then the run directory is gone, or full, and the launch says so
        tracked = read_tracked(directory) or TrackedRun(TrackedState.PENDING, read_request(directory).tracking_uri)
        locate(directory).write_private(TRACKED_FILE, replace(tracked, problem=f"{problem}.").encode())
