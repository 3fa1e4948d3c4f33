"""Node agent: torch's ``SimpleElasticAgent`` with our way to start, watch and stop ranks.

One thread of the launcher per run. Rank assignment and restarts are torch's. Ours waits on the ranks' sentinels instead
of polling, names the cause instead of the first exit code it sees, and can stop everything within a bound.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from air_nb.errors import RankFailure
from air_nb.launch.descendants import kill_descendants
from air_nb.launch.failures import find_failures, has_failed
from air_nb.launch.ladder import LADDERS, STATES, STEPS, StopKind
from air_nb.launch.oom import OomWatch
from air_nb.launch.rank_process import RankProcess
from air_nb.launch.rendezvous import LoopbackRendezvous
from air_nb.launch.stacks import collect_stacks
from air_nb.protocol.messages import RunState
from air_nb.protocol.start import RankStart
from air_nb.runs.checkpoints import saves_when_stopped, stop_grace_s
from air_nb.runs.directory import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerContext

    from air_nb.protocol.messages import Run

__all__ = ["NodeAgent"]

_SETTLE_S = 0.15  # ranks that die of one cause die close together; the first one to *report* may not be the cause
_SETTLE_MAX_S = 0.45
_TICK_S = 0.2
_STACKS_WAIT_S = 1.0
_STACKS_HURRY_S = 0.2  # while a person waits for an interrupt: 3 + 1.5 s of the ladder are 5 s nearly
_UNDEAD_WAIT_S = 5.0


class NodeAgent(SimpleElasticAgent):
    """Runs the ranks of one run on this node.

    Args:
        run: What to run.
        context: Context of the warm forkserver.
        forkserver_pid: Its pid; what a rank leaves behind ends up below it.
        on_started: Called with attempt and ranks when all have been forked.
        on_exit: Called with each rank whose process has ended.
        stop_requested: Asked now and then for the reason of a stop from another process.
    """

    def __init__(
        self,
        run: Run,
        context: ForkServerContext,
        forkserver_pid: int,
        on_started: Callable[[int, list[RankProcess]], None],
        on_exit: Callable[[int], None],
        stop_requested: Callable[[], str | None],
    ) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=run.nproc,
            entrypoint=run.run_id,
            rdzv_handler=LoopbackRendezvous(run.run_id),
            max_restarts=run.max_restarts,
            monitor_interval=1e-6,  # torch sleeps this long between looks; ours wait for events
            local_addr="127.0.0.1",
        )
        super().__init__(spec, exit_barrier_timeout=30)
        self._run = run
        self._context = context
        self._forkserver_pid = forkserver_pid
        self._on_started = on_started
        self._on_exit = on_exit
        self._stop_requested = stop_requested
        self._deadline = time.monotonic() + run.timeout_s if run.timeout_s is not None else None
        self._wake_reader, self._wake_writer = os.pipe()
        self._lock = threading.Lock()
        self._stop: StopKind | None = None
        self._first_stop: StopKind | None = None
        self._succeeded = False
        self._closed = False
        self._swept: set[int] = set()
        self._oom = OomWatch()
        self.reason = ""
        self.is_over = False
        self.ranks: list[RankProcess] = []
        self.failures: list[RankFailure] = []
        self.unresponsive: list[int] = []
        self.undead: list[int] = []

    def stop(self, kind: StopKind, reason: str = "") -> None:
        """Ask for an end; from any thread, at any time, more than once."""
        with self._lock:
            if self._stop is not None and self._stop >= kind:
                return
            if self._first_stop is None:
                self._first_stop, self.reason = kind, reason
            self._stop = kind
            self._remaining_restarts = 0
            if not self._closed:
                os.write(self._wake_writer, b"!")

    @property
    def state(self) -> RunState:
        """How the run ended: what came first counts."""
        if self._succeeded:
            return RunState.FINISHED
        if self.failures or self._first_stop is None:
            return RunState.FAILED
        return STATES[self._first_stop]

    @property
    def finished(self) -> list[int]:
        """Ranks whose values are written."""
        return [rank.rank for rank in self.ranks if rank.report is not None and rank.report.ok]

    @property
    def groups(self) -> set[int]:
        """Process groups of the ranks."""
        return {rank.pid for rank in self.ranks}

    def close(self) -> None:
        """Give back descriptors; the agent can't be used any more."""
        with self._lock:
            self._closed = True
            os.close(self._wake_reader)
            os.close(self._wake_writer)
        self._oom.close()
        for rank in self.ranks:
            rank.close()

    # -- what SimpleElasticAgent calls ------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = worker_group.spec.max_restarts - self._remaining_restarts
        for rank in self.ranks:
            rank.close()
        self.ranks, self.failures, self._swept = [], [], set()
        for worker in worker_group.workers:
            if self._stop is not None:
                break
            env = self._run.env | _torchrun_environment(worker_group, worker, attempt, self._run)
            start = RankStart(self._run.run_id, self._run.directory, worker.global_rank, attempt, env)
            self.ranks.append(RankProcess(self._context, start))
        self._on_started(attempt, self.ranks)
        return {index: rank.pid for index, rank in enumerate(self.ranks)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wait()
        failed = any(has_failed(rank) for rank in self.ranks)
        if failed:
            self._settle()
        elif len(self.ranks) == self._run.nproc and not self._alive():
            self._succeeded = True  # a stop that comes at this very moment has come too late
            return RunResult(state=WorkerState.SUCCEEDED)
        if self._stop is not None:
            self._stop_ranks()
            return RunResult(state=WorkerState.FAILED)
        if failed:
            found = find_failures(self.ranks, worker_group.spec.max_restarts - self._remaining_restarts)
            self.failures = [self._explain(failure) for failure in found]
            return RunResult(state=WorkerState.FAILED)
        return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - as torch calls it
        self._stop_ranks()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002 - likewise
        self._stop_ranks()

    def _record_worker_events(self, result: RunResult) -> None:
        """Nothing listens, and torch's needs failures in its own form."""

    def _construct_event(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - likewise
        """As torch's, without its look-up of the host's name, which takes seconds where DNS is broken."""
        from torch.distributed.elastic.events.api import Event, EventSource

        return Event("torchelastic.air_nb", source=EventSource.AGENT)

    # -- watching ---------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Until a rank reports or ends, a stop is asked for, or a short while has passed."""
        waitables = [item for rank in self.ranks for item in rank.waitables]
        wait([self._wake_reader, *waitables], timeout=self._tick())
        for rank in self.ranks:
            if rank.poll() is not None and rank.pid not in self._swept:
                self._swept.add(rank.pid)
                kill_descendants(self._forkserver_pid, groups={rank.pid})
                self._on_exit(rank.rank)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.stop(StopKind.TIMEOUT, f"the time limit of {self._run.timeout_s:g} s")
        elif (reason := self._stop_requested()) is not None:
            self.stop(StopKind.STOP, reason)

    def _tick(self) -> float:
        if self._deadline is None:
            return _TICK_S
        return max(0.0, min(_TICK_S, self._deadline - time.monotonic()))

    def _settle(self) -> None:
        """Give other failures of the same cause time to be reported: a moment after each, but not for ever."""
        last = time.monotonic() + _SETTLE_MAX_S
        end = time.monotonic() + _SETTLE_S
        known = sum(has_failed(rank) for rank in self.ranks)
        while (left := min(end, last) - time.monotonic()) > 0:
            waitables = [item for rank in self.ranks for item in rank.waitables]
            if not waitables:
                return
            wait(waitables, timeout=left)
            failed = sum(has_failed(rank) for rank in self.ranks)
            if failed > known:
                known, end = failed, time.monotonic() + _SETTLE_S

    def _explain(self, failure: RankFailure) -> RankFailure:
        if failure.signal != "SIGKILL" or failure.pid is None:
            return failure
        return replace(failure, hint=self._oom.explain(failure.pid) or failure.hint)

    # -- stopping ---------------------------------------------------------------------------------------------------

    def _stop_ranks(self) -> None:
        """SIGINT, SIGTERM, SIGKILL, all ranks at once, each step with its bound; a higher request skips ahead."""
        if self._stop == StopKind.TIMEOUT:
            self._collect_stacks(_STACKS_WAIT_S)
        for step, number in enumerate(STEPS):
            kind = self._stop or StopKind.FAILURE
            bound_s = self._bound_s(kind, step)
            if bound_s and (alive := self._alive()):
                if step and kind == StopKind.INTERRUPT:
                    self.unresponsive = [rank.rank for rank in alive]
                    self._collect_stacks(_STACKS_HURRY_S)
                self._signal(number)
                self._wait_until_gone(bound_s, unless_above=kind)
        self._signal(signal.SIGKILL)
        kill_descendants(self._forkserver_pid, groups=self.groups)
        self._wait_until_gone(_UNDEAD_WAIT_S, unless_above=StopKind.KILL)
        self.undead = [rank.pid for rank in self._alive()]

    def _bound_s(self, kind: StopKind, step: int) -> float:
        """A rank that is asked to stop may save a checkpoint first, if it has said that it will."""
        bound_s = LADDERS[kind][step]
        may_save = step == 0 and bound_s and kind in (StopKind.INTERRUPT, StopKind.STOP, StopKind.TIMEOUT)
        if may_save and saves_when_stopped(Path(self._run.directory)):
            return max(bound_s, stop_grace_s(self._run.env))
        return bound_s

    def _alive(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.poll() is None]

    def _signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def _wait_until_gone(self, bound_s: float, *, unless_above: StopKind) -> None:
        end = time.monotonic() + bound_s
        while (alive := self._alive()) and (left := end - time.monotonic()) > 0:
            ready = wait([self._wake_reader, *[item for rank in alive for item in rank.waitables]], timeout=left)
            if self._wake_reader in ready:
                os.read(self._wake_reader, 64)
                if self._stop is not None and self._stop > unless_above:
                    return

    def _collect_stacks(self, bound_s: float) -> None:
        ranks = {rank.rank: rank.identity for rank in self._alive() if rank.identity is not None}
        collect_stacks(RunDirectory(Path(self._run.directory)), ranks, bound_s)


def _torchrun_environment(group: WorkerGroup, worker: Any, attempt: int, run: Run) -> dict[str, str]:
    """What torchrun sets for a rank (torch.distributed.run, "Environment Variables"), and NODE_RANK."""
    values = {
        "RANK": worker.global_rank,
        "LOCAL_RANK": worker.local_rank,
        "WORLD_SIZE": worker.world_size,
        "LOCAL_WORLD_SIZE": group.spec.local_world_size,
        "GROUP_RANK": group.group_rank,
        "NODE_RANK": group.group_rank,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_RANK": worker.role_rank,
        "ROLE_NAME": group.spec.role,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RUN_ID": run.run_id,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": run.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": Path(run.directory) / f"rank_{worker.global_rank}.error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": run.env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {name: str(value) for name, value in values.items()}
