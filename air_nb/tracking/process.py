"""The tracking process: every call to MLflow for a kernel's runs is made here, on one thread per run.

Started by ``tracking.client`` as ``python -c``, in a session of its own. Its lifeline is the end of stdin and a pidfd
of the kernel; it outlives the kernel for the moment that it takes to end the runs that were open. Threads: the main one
imports MLflow and obeys; ``air_nb-commands`` reads stdin from the start, so that the kernel never waits for the import;
``air_nb-lifeline``; ``air_nb-finish`` for runs of the past; one per run (``tracking.run``).
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from air_nb.runs.liveness import ProcessId, call_when_gone
from air_nb.tracking.messages import TRACKING_VERSION, Begin, End, Finish, Finished, Message, Ready, decode, encode
from air_nb.tracking.run import FollowedRun, finish_run
from air_nb.tracking.store import use_environment
from air_nb.tracking.tracked_file import TrackedFile, read_request

__all__ = ["main"]

_READ_BYTES = 1 << 16
_LOOK_EVERY_S = 0.25
_OUTLIVE_S = 2.7  # of the 3 s in which all processes of a kernel that is gone have to be
_POLL_S = 0.02
_LOG_MAX_BYTES = 1 << 20
_NICE = 5


def main(kernel_pid: int, kernel_started_ticks: int) -> None:
    """Serve one kernel until it is gone or closes the pipe.

    Args:
        kernel_pid: The kernel.
        kernel_started_ticks: Its start time, so that a reused pid is not taken for it.
    """
    _TrackingProcess(ProcessId(kernel_pid, kernel_started_ticks)).serve()


class _TrackingProcess:
    """State of the process. Attributes are the main thread's, except where a lock is named."""

    def __init__(self, kernel: ProcessId) -> None:
        self._kernel = kernel
        self._commands = os.dup(0)
        self._replies = os.dup(1)
        self._send_lock = threading.Lock()
        self._queue: queue.Queue[Message] = queue.Queue()
        self._runs: dict[str, FollowedRun] = {}
        self._runs_lock = threading.Lock()
        self._is_gone = False
        self._problem: str | None = None

    def serve(self) -> None:
        """Take commands until the kernel is gone; the lifeline's thread ends the process then."""
        self._detach_stdio()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        call_when_gone(self._kernel, self._commands, self._end, name="air_nb-lifeline")
        threading.Thread(target=self._read_commands, name="air_nb-commands", daemon=True).start()
        with _nice():
            self._problem = _import_mlflow()
        self._send(Ready(TRACKING_VERSION, os.getpid(), self._problem))
        while True:
            with suppress(queue.Empty):
                command = self._queue.get(timeout=_LOOK_EVERY_S if self._runs else None)
                self._obey(command)
                self._queue.task_done()
            self._look()

    def _detach_stdio(self) -> None:
        """Keep the two pipes for the protocol; what libraries print goes to stderr, which is the log."""
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)

    def _read_commands(self) -> None:
        buffer = b""
        while data := os.read(self._commands, _READ_BYTES):
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                try:
                    self._queue.put(decode(line))
                except ValueError as error:
                    sys.stderr.write(f"air_nb: {error}\n")

    def _obey(self, command: Message) -> None:
        try:
            match command:
                case Begin(directory, env):
                    use_environment(env)
                    self._begin(Path(directory))
                case End(directory):
                    if (run := self._runs.get(Path(directory).name)) is not None:
                        run.end()
                case Finish(number, directories, env):
                    use_environment(env)
                    arguments = (number, directories)
                    threading.Thread(target=self._finish, args=arguments, name="air_nb-finish", daemon=True).start()
        except Exception:  # noqa: BLE001 - the border of the process: one bad command must not end the other runs
            traceback.print_exc()

    def _begin(self, path: Path) -> None:
        if self._problem is not None:
            TrackedFile(path, read_request(path)).update(problem=self._problem)
            return
        with self._runs_lock:
            followed = self._runs.get(path.name)
            if followed is None or not followed.is_alive:
                run = self._runs[path.name] = FollowedRun(path)
                run.start()
                if self._is_gone:
                    run.lose_kernel()

    def _finish(self, number: int, directories: list[str]) -> None:
        for path in map(Path, directories):
            try:
                outcome = self._problem or finish_run(path)
            except Exception as error:  # noqa: BLE001 - the border of the thread: the user waits for an answer
                traceback.print_exc()
                outcome = f"not sent: {type(error).__name__}: {error}."
            self._send(Finished(number, path.name, outcome))

    def _look(self) -> None:
        """Forget the runs that are done, say so where a server keeps one waiting, keep the log small."""
        with self._runs_lock:
            for run_id, run in list(self._runs.items()):
                if run.is_alive:
                    run.look()
                else:
                    del self._runs[run_id]
        with suppress(OSError):
            if os.fstat(2).st_size > _LOG_MAX_BYTES:
                os.ftruncate(2, 0)

    def _send(self, message: Message) -> None:
        with self._send_lock, suppress(BrokenPipeError):
            data = encode(message)
            while data:
                data = data[os.write(self._replies, data) :]

    def _end(self) -> NoReturn:
        """The kernel is gone, or has closed the pipe: end the runs that are open, quickly. On the lifeline's thread."""
        end = time.monotonic() + _OUTLIVE_S
        with self._runs_lock:
            self._is_gone = True
            for run in self._runs.values():
                run.lose_kernel()
        while self._is_busy() and time.monotonic() < end:
            time.sleep(_POLL_S)
        os._exit(0)

    def _is_busy(self) -> bool:
        with self._runs_lock:
            return self._queue.unfinished_tasks > 0 or any(run.is_alive for run in self._runs.values())


def _import_mlflow() -> str | None:
    """Import what a run needs, and what would otherwise delay the first one; says why that failed, if so."""
    use_environment(dict(os.environ))
    try:
        import mlflow

        assert mlflow is not None
        with suppress(ImportError):  # not in every installation of MLflow
            from mlflow.store.tracking import sqlalchemy_store
            from mlflow.system_metrics import system_metrics_monitor

            assert sqlalchemy_store is not None
            assert system_metrics_monitor is not None
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        traceback.print_exc()
        return f"MLflow can't be imported ({type(error).__name__}: {error}): `pip install 'mlflow>=3.7'`."
    return None


@contextmanager
def _nice() -> Iterator[None]:
    """Leave the cores to the ranks for now, if this process may take them back later."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, usual - 1)  # asks whether it may
        os.setpriority(os.PRIO_PROCESS, 0, usual + _NICE)
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, usual)
