"""The launcher process: one per kernel and environment; warms a forkserver, runs node agents, dies with the kernel.

Main thread: lifeline, forkserver (its death signal belongs to the thread that starts it), commands. One thread per run: its
node agent. Started as ``python -c`` by ``launch.client``, since forkserver children import the main *file* again.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing import forkserver, util
from pathlib import Path
from typing import TYPE_CHECKING

from air_nb.launch import preload
from air_nb.launch.descendants import become_subreaper, kill_descendants
from air_nb.protocol.messages import (
    PROTOCOL_VERSION,
    Done,
    Exited,
    Interrupt,
    Kill,
    Ready,
    Refused,
    Retire,
    Run,
    RunState,
    Started,
    decode,
    encode,
)
from air_nb.runs.directory import RunDirectory
from air_nb.runs.liveness import ProcessId

if TYPE_CHECKING:
    from dataclasses import dataclass  # noqa: F401

    from air_nb.launch.agent import NodeAgent, StopKind
    from air_nb.protocol.messages import Event

__all__ = ["IDLE_MODULES", "WARM_MODULE", "main"]

WARM_MODULE = "air_nb.rank.warm"
IDLE_MODULES = "torch._dynamo"
_PRELOAD_MODULE = "air_nb.launch.preload"
_WARM_TIMEOUT_S = 300.0
_READ_BYTES = 1 << 16


def main(kernel_pid: int, kernel_started_ticks: int, directory: str) -> None:
    """Serve one kernel until it ends, its pipe closes or it says ``Retire``.

    Args:
        kernel_pid: The kernel.
        kernel_started_ticks: Its start time, so that a reused pid is not taken for it.
        directory: Private directory for sockets, deleted at the end.
    """
    Launcher(ProcessId(kernel_pid, kernel_started_ticks), Path(directory)).serve()


class Launcher:
    """State of the launcher process. Attributes are the main thread's, except where a lock is named."""

    def __init__(self, kernel: ProcessId, directory: Path) -> None:
        self._kernel = kernel
        self._directory = directory
        self._commands = os.dup(0)
        self._events = os.dup(1)
        self._send_lock = threading.Lock()
        self._agents: dict[str, NodeAgent] = {}
        self._agents_lock = threading.Lock()
        self._retiring = False
        self._deepened = False
        self._wake_reader, self._wake_writer = os.pipe()
        self._context = multiprocessing.get_context("forkserver")
        self._forkserver_pid = 0

    def serve(self) -> None:
        """Warm up, then take commands until the kernel is gone."""
        self._detach_stdio()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        become_subreaper()
        try:
            kernel_pidfd = self._open_kernel()
            self._warm(kernel_pidfd)
            self._take_commands(kernel_pidfd)
        finally:
            self._end()

    # -- start -------------------------------------------------------------------------------------------------------

    def _detach_stdio(self) -> None:
        """Keep the two pipes for the protocol; libraries that print go to stderr, which is the launcher's log."""
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)

    def _open_kernel(self) -> int:
        """A pidfd of the kernel: a forked child of it may hold the pipe's other end after its death."""
        try:
            pidfd = os.pidfd_open(self._kernel.pid)
        except ProcessLookupError:
            sys.exit(0)
        if not self._kernel.is_alive():
            sys.exit(0)
        return pidfd

    def _warm(self, kernel_pidfd: int) -> None:
        started = time.monotonic()
        # Its sockets go where the next launcher finds and sweeps them if this one is killed.
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._directory)
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        os.environ[preload.WARM_VARIABLE] = WARM_MODULE
        os.environ[preload.IDLE_VARIABLE] = IDLE_MODULES
        forkserver.set_forkserver_preload([_PRELOAD_MODULE])
        forkserver.ensure_running()
        self._forkserver_pid = forkserver._forkserver._forkserver_pid  # noqa: SLF001 - no public way to its pid
        import air_nb.launch.agent  # noqa: F401, PLC0415 - imports torch, while the forkserver does so too

        problem = self._probe(kernel_pidfd)
        self._send(
            Ready(PROTOCOL_VERSION, os.getpid(), self._forkserver_pid, round(time.monotonic() - started, 3), problem)
        )

    def _probe(self, kernel_pidfd: int) -> str | None:
        """Fork once: answered when the forkserver has imported everything, with what is wrong with it."""
        reader, writer = self._context.Pipe(duplex=False)
        process = self._context.Process(target=preload.probe, args=(writer,))
        process.start()
        writer.close()
        ready, _, _ = select.select([reader, kernel_pidfd, self._forkserver_pidfd()], [], [], _WARM_TIMEOUT_S)
        if kernel_pidfd in ready:
            self._end()
        if reader not in ready:
            return f"the forkserver ended or did not answer in {_WARM_TIMEOUT_S:g} s while it imported torch"
        try:
            problem = reader.recv_bytes().decode()
        except EOFError:
            return "the forkserver's first child ended without an answer"
        process.join()
        return problem or None

    def _forkserver_pidfd(self) -> int:
        return os.pidfd_open(self._forkserver_pid)

    # -- commands ----------------------------------------------------------------------------------------------------

    def _take_commands(self, kernel_pidfd: int) -> None:
        forkserver_pidfd = self._forkserver_pidfd()
        buffer = b""
        while not (self._retiring and not self._agents):
            watched = [self._commands, kernel_pidfd, forkserver_pidfd, self._wake_reader]
            ready, _, _ = select.select(watched, [], [], None if self._deepened else 0.5)
            if kernel_pidfd in ready:
                return
            if forkserver_pidfd in ready:
                self._lose_forkserver()
                return
            if self._wake_reader in ready:
                os.read(self._wake_reader, _READ_BYTES)
            if not ready and not self._agents:
                self._deepen()
            if self._commands in ready:
                data = os.read(self._commands, _READ_BYTES)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._obey(line)

    def _deepen(self) -> None:
        """Nothing to do for half a second: let the forkserver import what most training code will need."""
        self._deepened = True
        os.kill(self._forkserver_pid, preload.DEEPEN_SIGNAL)

    def _obey(self, line: bytes) -> None:
        from air_nb.launch.agent import StopKind

        command = decode(line)
        match command:
            case Run():
                threading.Thread(target=self._run, args=(command,), name=f"air_nb-agent-{command.run_id}").start()
            case Interrupt(run_id):
                self._stop(run_id, StopKind.INTERRUPT, "interrupted")
            case Kill(run_id):
                self._stop(run_id, StopKind.KILL, "interrupted twice")
            case Retire():
                self._retiring = True

    def _stop(self, run_id: str, kind: StopKind, reason: str) -> None:
        with self._agents_lock:
            agent = self._agents.get(run_id)
        if agent is not None:
            agent.stop(kind, reason)

    # -- one run, on its own thread -----------------------------------------------------------------------------------

    def _run(self, run: Run) -> None:
        directory = RunDirectory(Path(run.directory))
        try:
            done = self._run_agent(run, directory)
        except Exception:  # noqa: BLE001 - the border of the run's thread: the kernel waits for an answer
            reason = traceback.format_exc()
            sys.stderr.write(reason)
            self._record(directory, state=RunState.FAILED, ended_at=time.time(), reason=reason)
            self._send(Refused(run.run_id, reason))
        else:
            self._record(
                directory, state=RunState(done.state), ended_at=time.time(), failures=done.failures, reason=done.reason
            )
            self._send(done)
        os.write(self._wake_writer, b"!")

    def _run_agent(self, run: Run, directory: RunDirectory) -> Done:
        from dataclasses import asdict

        from air_nb.launch.agent import NodeAgent

        def started(attempt: int, pids: list[int]) -> None:
            self._record(
                directory,
                state=RunState.RUNNING,
                started_at=time.time(),
                launcher=ProcessId.own(),
                pids=pids,
                attempt=attempt,
            )
            self._send(Started(run.run_id, attempt, pids))

        def exited(rank: int) -> None:
            self._send(Exited(run.run_id, rank))

        agent = NodeAgent(run, self._context, self._forkserver_pid, started, exited, directory.stop_requested)
        with self._agents_lock:
            self._agents[run.run_id] = agent
        try:
            agent.run()
        finally:
            self._sweep(run.run_id, agent)
        return Done(
            run.run_id,
            agent.state,
            [asdict(failure) for failure in agent.failures],
            agent.finished,
            agent.reason,
            agent.undead,
        )

    def _sweep(self, run_id: str, agent: NodeAgent) -> None:
        """End what the run left behind. Daemons have left their group: they go when no other run could own them."""
        with self._agents_lock:
            alone = len(self._agents) == 1
            kill_descendants(self._forkserver_pid, groups=None if alone else agent.groups)
            del self._agents[run_id]
        agent.close()

    def _record(self, directory: RunDirectory, **changes: object) -> None:
        try:
            directory.update_record(**changes)
        except (OSError, ValueError) as error:  # a full disk must not end the run
            sys.stderr.write(f"air_nb: could not write {directory.path}/run.json: {error}\n")

    def _send(self, event: Event) -> None:
        with self._send_lock:
            try:
                data = encode(event)
                while data:
                    data = data[os.write(self._events, data) :]
            except BrokenPipeError:
                return  # the kernel is gone; its pidfd ends the main loop

    # -- end ---------------------------------------------------------------------------------------------------------

    def _lose_forkserver(self) -> None:
        """Without it ranks are gone too; the agents report that, then a new launcher is needed."""
        end = time.monotonic() + 5
        while self._agents and time.monotonic() < end:
            time.sleep(0.02)

    def _end(self) -> None:
        """End every process below this one, record what was running, delete the directory, exit."""
        kill_descendants(self._forkserver_pid) if self._forkserver_pid else None
        with self._agents_lock:
            running = list(self._agents)
        for run_id in running:
            for path in (self._agents[run_id]._run.directory,) if run_id in self._agents else ():  # noqa: SLF001
                self._record(
                    RunDirectory(Path(path)), state=RunState.KILLED, ended_at=time.time(), reason="the kernel ended"
                )
        kill_descendants(os.getpid())
        util._finalizer_registry.clear()  # noqa: SLF001 - multiprocessing would wait for children that were just killed
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(0)
