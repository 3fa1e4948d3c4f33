"""The user's session: owns the launcher and the GPU sampler, composes capture, placement, launch and view.

One per process, made on first use. Every launch runs on the thread that asked for it and blocks it until no process of the
run is left; several threads may launch at a time. Threads of its own: the launcher's reader (see ``launch.client``).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from air_nb.capture.credentials import mask_credentials
from air_nb.capture.freeze import CapturedNamespace, capture
from air_nb.errors import AirNbError, NestedLaunchError
from air_nb.launch.client import LauncherClient
from air_nb.launch.key import changed, current_key
from air_nb.monitor.sampler import Sampler
from air_nb.protocol.messages import Done, Interrupt, Run, RunState
from air_nb.protocol.names import WARNING_FILTERS
from air_nb.protocol.task import PAYLOAD_FILE, RankTask
from air_nb.runs.directory import RunDirectory, RunRecord, make_run_name
from air_nb.runs.liveness import ProcessId
from air_nb.runs.retention import close_dead_runs, prune
from air_nb.session.devices import Placement, place
from air_nb.session.interrupts import InterruptCounter
from air_nb.session.kernel_state import kernel_facts, rank_environment, warning_filters
from air_nb.session.outcome import fail, load_values
from air_nb.session.wait import RunWaiter
from air_nb.view.cell import CellView
from air_nb.view.draw import detect_front

if TYPE_CHECKING:
    from collections.abc import Mapping

    from IPython.core.interactiveshell import InteractiveShell

    from air_nb.options import RunOptions

__all__ = ["Launch", "Session", "get_session"]

_DEFAULT_PAYLOAD_MIB = 256
_WARM_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run on every rank.

    Attributes:
        kind: ``"cell"`` or ``"function"``.
        source: Text for the record; for a cell also what the ranks run.
        names: Captured names and their values.
        task: Further fields of ``RankTask``.
    """

    kind: str
    source: str
    names: Mapping[str, Any]
    task: Mapping[str, Any] = field(default_factory=dict)


class Session:
    """See the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launcher: LauncherClient | None = None
        self._sampler = Sampler()
        os.register_at_fork(after_in_child=self._abandon)

    @property
    def sampler(self) -> Sampler:
        """Samples the GPUs of this machine."""
        return self._sampler

    @property
    def launcher(self) -> LauncherClient | None:
        """The warm launcher, if there is one."""
        return self._launcher

    def warm(self) -> None:
        """Start launcher and sampler in the background; returns at once."""
        with self._lock:
            if self._launcher is None or not self._launcher.is_alive:
                self._launcher = LauncherClient(os.environ)
        self._sampler.start()

    def tidy(self) -> None:
        """Close the records of runs that died with their kernel, and delete the oldest directories."""
        close_dead_runs()
        prune()

    def close(self) -> None:
        """End the launcher and everything below it, and the sampler."""
        with self._lock:
            launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.close()
        self._sampler.close()

    def _abandon(self) -> None:
        """A forked child of the kernel must hold no lifeline of ours, or the launcher would outlive the kernel."""
        if self._launcher is not None:
            self._launcher.abandon()
            self._launcher = None

    def run(self, launch: Launch, options: RunOptions, shell: InteractiveShell | None) -> list[dict[str, Any]]:
        """Run on every rank and wait.

        Returns:
            One dict of values per rank, index = rank: what ``task.out``, ``task.pull`` or a function's return produced.

        Raises:
            NestedLaunchError: This process is a rank.
            CaptureError: A name can't be sent; nothing was started.
            DeviceError: The devices are not there; nothing was started.
            RankFailedError: A rank failed.
            KeyboardInterrupt: The run was interrupted; no process of it is left.
        """
        if "AIR_NB_RUN_ID" in os.environ:
            msg = "this is a rank already: a run can't be started inside a run"
            raise NestedLaunchError(msg)
        captured = self._capture(launch, shell)
        name = options.name or make_run_name()
        directory = RunDirectory.create()
        placement = place(options, self._sampler, f"pid {os.getpid()}, run {name}")
        with placement.held:
            return _LaunchedRun(self, launch, options, shell, captured, placement, directory, name).run()

    def _capture(self, launch: Launch, shell: InteractiveShell | None) -> CapturedNamespace:
        namespace = {**launch.names, WARNING_FILTERS: warning_filters()}
        return capture(
            list(namespace),
            namespace,
            main_globals=shell.user_ns if shell is not None else sys.modules["__main__"].__dict__,
            limit_bytes=int(os.environ.get("AIR_NB_MAX_PAYLOAD_MIB") or _DEFAULT_PAYLOAD_MIB) << 20,
            hidden=shell.user_ns_hidden if shell is not None else {},
        )

    def fitting_launcher(self, *, cold: bool) -> tuple[LauncherClient, str]:
        """A launcher for the environment as it is now, and a note if a new one had to be started."""
        with self._lock:
            old = self._launcher
            why = ""
            if old is not None and not old.is_alive:
                old, why = None, "the launcher had ended"
            elif old is not None and cold:
                why = "--cold"
            elif old is not None and (names := changed(old.key, current_key())):
                why = f"{', '.join(names)} changed"
            if old is not None and not why:
                return old, ""
            if old is not None:
                old.retire()
            self._launcher = LauncherClient(os.environ)
            return self._launcher, why and f"{why}: new launcher"


class _LaunchedRun:
    """One launch from placement to values."""

    def __init__(  # noqa: PLR0913, PLR0917 - everything that a launch consists of
        self,
        session: Session,
        launch: Launch,
        options: RunOptions,
        shell: InteractiveShell | None,
        captured: CapturedNamespace,
        placement: Placement,
        directory: RunDirectory,
        name: str,
    ) -> None:
        self._session = session
        self._launch = launch
        self._options = options
        self._shell = shell
        self._captured = captured
        self._placement = placement
        self._directory = directory
        self._name = name
        self._nproc = placement.topology.world_size
        self._notes = [note for note in (placement.note, _gpu_note(captured)) if note]
        self._launcher: LauncherClient | None = None

    def run(self) -> list[dict[str, Any]]:
        env = self._write_files()
        view = CellView(
            self._nproc,
            self._options.output,
            self._name,
            quiet=self._options.quiet,
            front=detect_front(),
            log_dir=self._directory.path,
        )
        run = Run(self._directory.run_id, str(self._directory.path), self._nproc, env, self._options.timeout_s)
        waker = _Waker()
        with InterruptCounter(waker.wake) as interrupts:
            launcher = self._warm_launcher(interrupts)
            view.start(self._header())
            started = time.monotonic()
            events = launcher.run(run)
            waker.events = events
            if interrupts.count:
                events.wake()
            try:
                done = RunWaiter(self._directory, self._nproc, events, launcher, view, interrupts).wait()
            finally:
                waker.events = None
                launcher.forget(run.run_id)
            view.header(f"{self._header()} · {done.state}")
            view.finish(_footer(done, time.monotonic() - started))
        return self._outcome(done, interrupted=interrupts.count > 0)

    def _write_files(self) -> dict[str, str]:
        env, threads = rank_environment(
            self._placement.topology, self._options.env, self._directory.run_id, self._name
        )
        facts = kernel_facts(self._shell, threads, self._captured.sources)
        kind = "cell" if self._launch.kind == "cell" else "function"
        fields: dict[str, Any] = {"header": "", **facts, **self._launch.task}
        RankTask(kind=kind, run_name=self._name, source=self._launch.source, **fields).write(self._directory.path)
        self._captured.bundle.write(self._directory.path / PAYLOAD_FILE)
        self._directory.write_private("cell.py", mask_credentials(self._launch.source))
        topology = self._placement.topology
        options = asdict(self._options) | {"env": sorted(self._options.env)}
        self._directory.write_record(
            RunRecord(
                run_id=self._directory.run_id,
                name=self._name,
                state=RunState.STARTING,
                created_at=time.time(),
                nproc=self._nproc,
                device=topology.device,
                gpu_uuids=list(topology.gpu_uuids),
                options=options,
                kernel=ProcessId.own(),
            )
        )
        return env

    def _warm_launcher(self, interrupts: InterruptCounter) -> LauncherClient:
        """The launcher, once it is warm; an interrupt ends the waiting, not the warming."""
        launcher, note = self._session.fitting_launcher(cold=self._options.cold)
        started = time.monotonic()
        while not launcher.wait_ready(0.1):
            if interrupts.count:
                self._abort("interrupted while the launcher was warming up")
                raise KeyboardInterrupt
            if time.monotonic() - started > _WARM_TIMEOUT_S:
                self._abort("the launcher did not get warm")
                msg = f"the launcher was not ready after {_WARM_TIMEOUT_S:g} s.\n{launcher.log_tail()}"
                raise AirNbError(msg)
        if note:
            self._notes.append(f"{note}, {time.monotonic() - started:.1f} s")
        return launcher

    def _abort(self, reason: str) -> None:
        self._directory.update_record(state=RunState.KILLED, ended_at=time.time(), reason=reason)

    def _header(self) -> str:
        topology = self._placement.topology
        where = "CPU (gloo)"
        if topology.device == "cuda":
            where = ", ".join(f"rank {rank} → {label}" for rank, label in enumerate(topology.gpu_labels))
        ranks = f"{self._nproc} rank{'s' if self._nproc != 1 else ''}"
        return " · ".join([f"run {self._name}", f"{ranks} on {where}", *self._notes])

    def _outcome(self, done: Done, *, interrupted: bool) -> list[dict[str, Any]]:
        values = load_values(self._directory, done.finished, self._nproc, self._captured.shipped)
        if done.state == RunState.FINISHED:
            self._directory.settle()
            return [value or {} for value in values]
        error = fail(
            done, self._directory, self._nproc, _results(values), self._captured.shipped, interrupted=interrupted
        )
        self._directory.settle()
        raise error


def _results(values: list[dict[str, Any] | None]) -> list[Any]:
    """For the exception: the value itself where there is one per rank, else the dict of names."""
    return [next(iter(value.values())) if value and len(value) == 1 else value for value in values]


class _Waker:
    """Wakes whoever waits for a run, from a signal handler."""

    def __init__(self) -> None:
        self.events: Any = None

    def wake(self) -> None:
        if self.events is not None:
            with suppress(OSError):
                self.events.wake()


def _gpu_note(captured: CapturedNamespace) -> str:
    return "tensors on a GPU went through host memory" if captured.moved_from_gpu else ""


def _footer(done: Done, seconds: float) -> str:
    return f"{done.state} in {seconds:.1f} s"


_session: Session | None = None
_session_lock = threading.Lock()


def get_session() -> Session:
    """The session of this process; made on first use."""
    global _session  # noqa: PLW0603 - one per process is the point
    with _session_lock:
        if _session is None:
            _session = Session()
        return _session


def close_session() -> None:
    """End the session; the next ``get_session`` makes a new one."""
    global _session  # noqa: PLW0603
    with _session_lock:
        session, _session = _session, None
    if session is not None:
        session.close()
