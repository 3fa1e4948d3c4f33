"""The launcher process: one per kernel and environment; warms a forkserver, runs node agents, dies with the kernel.

Main thread: forkserver (its death signal belongs to the thread that starts it), commands. ``air_nb-lifeline``: waits
for the end of the kernel, from the first moment on, since the main thread imports torch for seconds. One thread per
run: its node agent. Started as ``python -c`` by ``launch.client``, since forkserver children import the main *file*
again.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from air_nb.launch import forkserver
from air_nb.launch.descendants import become_subreaper, kill_descendants
from air_nb.launch.failures import describe_exit
from air_nb.launch.ladder import StopKind
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
from air_nb.runs.liveness import ProcessId, call_when_gone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from air_nb.launch.agent import NodeAgent
    from air_nb.launch.rank_process import RankProcess
    from air_nb.protocol.messages import Event

__all__ = ["main"]

_WARM_TIMEOUT_S = 300.0
_IDLE_S = 0.1  # longer than a kernel takes to send the run that waited for the warm-up, or the next cell of Run All
_AGENTS_END_S = 1.0
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
        self._end_lock = threading.Lock()
        self._retiring = False
        self._deepened = False
        self._wake_reader, self._wake_writer = os.pipe()
        self._context = multiprocessing.get_context("forkserver")
        self._forkserver_pid = 0
        self._forkserver_pidfd = -1

    def serve(self) -> None:
        """Warm up, then take commands until the kernel is gone."""
        self._detach_stdio()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        become_subreaper()
        call_when_gone(self._kernel, self._commands, self._end, name="air_nb-lifeline")
        try:
            self._warm()
            self._take_commands()
        except Exception:  # noqa: BLE001 - the border of the process: the kernel shows the log's end
            traceback.print_exc()
        self._end()

    # -- start -------------------------------------------------------------------------------------------------------

    def _detach_stdio(self) -> None:
        """Keep the two pipes for the protocol; libraries that print go to stderr, which is the launcher's log."""
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)

    def _warm(self) -> None:
        started = time.monotonic()
        # Its sockets go where the next launcher finds and sweeps them if this one is killed.
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._directory)
        forkserver.warm()
        private = [self._commands, self._events, self._wake_reader, self._wake_writer]
        self._forkserver_pid = forkserver.start_forkserver(private)
        self._forkserver_pidfd = os.pidfd_open(self._forkserver_pid)
        problem = self._probe()
        self._send(self._ready(round(time.monotonic() - started, 3), problem))

    def _ready(self, warm_s: float, problem: str | None) -> Ready:
        return Ready(PROTOCOL_VERSION, os.getpid(), self._forkserver_pid, warm_s, problem)

    def _probe(self) -> str | None:
        """Fork once: answered when the forkserver has imported everything, with what is wrong with it."""
        reader, writer = self._context.Pipe(duplex=False)
        process = self._context.Process(target=forkserver.probe, args=(writer,))
        process.start()
        writer.close()
        with reader:
            if reader not in wait([reader, self._forkserver_pidfd], _WARM_TIMEOUT_S):
                return f"the forkserver ended or did not answer in {_WARM_TIMEOUT_S:g} s while it imported torch"
            try:
                problem = reader.recv_bytes().decode()
            except EOFError:
                return "the forkserver's first child ended without an answer"
        process.join()
        process.close()
        return problem or None

    # -- commands ----------------------------------------------------------------------------------------------------

    def _take_commands(self) -> None:
        buffer = b""
        while not (self._retiring and not self._agents):
            watched = [self._commands, self._forkserver_pidfd, self._wake_reader]
            ready = wait(watched, None if self._deepened else _IDLE_S)
            if self._forkserver_pidfd in ready:
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
        """Nothing to do for a moment: let the forkserver import what most training code will need."""
        self._deepened = True
        os.kill(self._forkserver_pid, forkserver.DEEPEN_SIGNAL)

    def _obey(self, line: bytes) -> None:
        command = decode(line)
        match command:
            case Run():
                self._start(command)
            case Interrupt(run_id):
                self._stop(run_id, StopKind.INTERRUPT, "interrupted")
            case Kill(run_id, reason):
                self._stop(run_id, StopKind.KILL, reason)
            case Retire():
                self._retiring = True

    def _start(self, run: Run) -> None:
        """Make the agent here, before the next command is read: an interrupt right behind the run must find it."""
        from air_nb.launch.agent import NodeAgent

        directory = RunDirectory(Path(run.directory))

        def started(attempt: int, ranks: list[RankProcess]) -> None:
            record = {
                "state": RunState.RUNNING,
                "started_at": time.time(),
                "launcher": ProcessId.own(),
                "ranks": [rank.identity for rank in ranks],
                "attempt": attempt,
            }
            with _reported(directory):
                directory.update_record(**record)
            self._send(Started(run.run_id, attempt, [rank.pid for rank in ranks]))

        def exited(rank: int) -> None:
            self._send(Exited(run.run_id, rank))

        try:
            agent = NodeAgent(run, self._context, self._forkserver_pid, started, exited, directory.stop_requested)
        except (OSError, ValueError):
            self._refuse(run, directory)
            return
        with self._agents_lock:
            self._agents[run.run_id] = agent
        name = f"air_nb-agent-{run.run_id}"
        threading.Thread(target=self._run, args=(run, agent, directory), name=name, daemon=True).start()

    def _stop(self, run_id: str, kind: StopKind, reason: str) -> None:
        with self._agents_lock:
            agent = self._agents.get(run_id)
        if agent is not None:
            agent.stop(kind, reason)

    # -- one run, on its own thread -----------------------------------------------------------------------------------

    def _run(self, run: Run, agent: NodeAgent, directory: RunDirectory) -> None:
        try:
            agent.run()
            self._sweep(agent)
        except Exception:  # noqa: BLE001 - the border of the run's thread: the kernel waits for an answer
            self._refuse(run, directory)
        else:
            self._finish(run, agent, directory)
        with self._agents_lock:
            del self._agents[run.run_id]
        agent.close()
        os.write(self._wake_writer, b"!")

    def _refuse(self, run: Run, directory: RunDirectory) -> None:
        reason = traceback.format_exc()
        sys.stderr.write(reason)
        self._close_record(directory, state=RunState.FAILED, reason=reason)
        self._send(Refused(run.run_id, reason))

    def _finish(self, run: Run, agent: NodeAgent, directory: RunDirectory) -> None:
        failures = [asdict(failure) for failure in agent.failures]
        self._close_record(directory, state=agent.state, failures=failures, reason=agent.reason)
        ended = (agent.state, failures, agent.finished, agent.reason, agent.undead, agent.unresponsive)
        self._send(Done(run.run_id, *ended))

    def _sweep(self, agent: NodeAgent) -> None:
        """End what the run left behind. Daemons have left their group: they go when no other run could own them."""
        with self._agents_lock:
            agent.is_over = True
            alone = all(other.is_over for other in self._agents.values())
            kill_descendants(self._forkserver_pid, groups=None if alone else agent.groups)

    @staticmethod
    def _close_record(directory: RunDirectory, **changes: object) -> None:
        with _reported(directory):
            directory.close_record(ended_at=time.time(), **changes)

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
        """Without it the ranks are gone too: the runs end with the reason, and the kernel starts a new launcher."""
        problem = f"the process that ranks are forked from {self._forkserver_end()}"
        self._send(self._ready(0.0, problem))
        self._stop_agents(StopKind.LOST, problem)
        self._wait_for_agents(5.0)

    def _forkserver_end(self) -> str:
        try:
            return describe_exit(os.waitstatus_to_exitcode(os.waitpid(self._forkserver_pid, 0)[1]))
        except ChildProcessError:  # multiprocessing has reaped it, on its way to start a rank
            return "ended"

    def _stop_agents(self, kind: StopKind, reason: str) -> None:
        with self._agents_lock:
            for agent in self._agents.values():
                agent.stop(kind, reason)

    def _wait_for_agents(self, bound_s: float) -> None:
        end = time.monotonic() + bound_s
        while self._agents and time.monotonic() < end:
            time.sleep(0.01)

    def _end(self) -> NoReturn:
        """End every process below this one, have the runs recorded, delete the directory, exit. On any thread."""
        self._end_lock.acquire()  # for good: who comes second waits here for the exit
        self._stop_agents(StopKind.KILL, "the kernel ended")
        # The tracker ends by itself when all others have, and unlinks the shared memory that they left.
        spare = {resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]  # noqa: SLF001
        kill_descendants(os.getpid(), spare=spare)
        self._wait_for_agents(_AGENTS_END_S)
        kill_descendants(os.getpid(), spare=spare)
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(0)


@contextmanager
def _reported(directory: RunDirectory) -> Iterator[None]:
    """A record that can't be written, on a full disk mostly, must not end the run."""
    try:
        yield
    except (OSError, ValueError) as error:
        sys.stderr.write(f"air_nb: could not write {directory.path}/run.json: {error}\n")
