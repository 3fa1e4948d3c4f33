"""One launch: captured, placed, handed to the launcher, followed, and its values or its failure brought home.

Runs on the thread that asked for it and blocks it until no process of the run is left.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from air_nb.capture.credentials import mask_credentials
from air_nb.capture.freeze import CapturedNamespace, capture
from air_nb.errors import LauncherError
from air_nb.protocol.messages import Done, Run, RunState
from air_nb.protocol.names import WARNING_FILTERS
from air_nb.protocol.task import PAYLOAD_FILE, RankTask
from air_nb.runs.directory import RunDirectory, make_run_name
from air_nb.session.devices import Placement, place
from air_nb.session.interrupts import InterruptCounter
from air_nb.session.kernel_state import kernel_facts, warning_filters
from air_nb.session.mlflow_state import source_name, tracking_request
from air_nb.session.outcome import fail, interruption, load_values
from air_nb.session.run_files import (
    close_record,
    environment_of,
    unwritable_is_explained,
    write_first_record,
    write_task,
)
from air_nb.session.tracked import HOOK, Tracked, is_tracked, untracked_note
from air_nb.session.wait import RunWaiter, end_run
from air_nb.view.cell import CellView
from air_nb.view.draw import detect_front, pin_thread_to_cell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from IPython.core.interactiveshell import InteractiveShell

    from air_nb.launch.client import LauncherClient
    from air_nb.options import RunOptions
    from air_nb.session.session import Session
    from air_nb.tracking.links import Link

__all__ = ["Launch", "run_launch"]

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

    kind: Literal["cell", "function"]
    source: str
    names: Mapping[str, Any]
    task: Mapping[str, Any] = field(default_factory=dict)


def run_launch(
    session: Session, launch: Launch, options: RunOptions, shell: InteractiveShell | None
) -> list[dict[str, Any]]:
    """Run on every rank and wait; see ``Session.run``."""
    pin_thread_to_cell()  # now: another cell may run while the launcher warms up
    _check_cwd()
    captured = _capture(launch, shell)
    name = options.name or make_run_name()
    placement = place(options, session.sampler, f"pid {os.getpid()}, run {name}")
    with placement.held:
        return _LaunchedRun(session, launch, options, shell, captured, placement, name).run()


def _capture(launch: Launch, shell: InteractiveShell | None) -> CapturedNamespace:
    namespace = {**launch.names, WARNING_FILTERS: warning_filters()}
    return capture(
        list(namespace),
        namespace,
        main_globals=shell.user_ns if shell is not None else sys.modules["__main__"].__dict__,
        limit_bytes=int(os.environ.get("AIR_NB_MAX_PAYLOAD_MIB") or _DEFAULT_PAYLOAD_MIB) << 20,
        hidden=shell.user_ns_hidden if shell is not None else {},
    )


class _LaunchedRun:
    """One launch from placement to values."""

    def __init__(  # noqa: PLR0917 - everything that a launch consists of
        self,
        session: Session,
        launch: Launch,
        options: RunOptions,
        shell: InteractiveShell | None,
        captured: CapturedNamespace,
        placement: Placement,
        name: str,
    ) -> None:
        self._session = session
        self._launch = launch
        self._options = options
        self._shell = shell
        self._captured = captured
        self._placement = placement
        with unwritable_is_explained():
            self._directory = RunDirectory.create()
        self._name = name
        self._nproc = placement.topology.world_size
        self._notes = [note for note in (placement.note, _gpu_note(captured)) if note]
        self._tracked: Tracked | None = None

    def run(self) -> list[dict[str, Any]]:
        try:
            with unwritable_is_explained():
                env = self._write_files()
        except BaseException:
            shutil.rmtree(self._directory.path, ignore_errors=True)  # no run: nothing was started
            raise
        waker = _Waker()
        try:
            with InterruptCounter(waker.wake) as interrupts:
                done, interrupted = self._launch_and_follow(env, interrupts, waker)
        except BaseException as error:
            state = RunState.KILLED if isinstance(error, KeyboardInterrupt) else RunState.FAILED
            close_record(self._directory, state, str(error))
            if self._tracked is not None:
                self._end_tracking(self._tracked, ok=False)
            raise
        return self._outcome(done, interrupted=interrupted)

    def _launch_and_follow(self, env: dict[str, str], interrupts: InterruptCounter, waker: _Waker) -> tuple[Done, bool]:
        """How it ended, and whether it was interrupted before that; later it is too late."""
        view = CellView(
            self._nproc,
            self._options.output,
            self._directory.run_id,
            quiet=self._options.quiet,
            front=detect_front(),
            log_dir=self._directory.path,
        )
        launcher, note = self._session.borrow_launcher(cold=self._options.cold)
        try:
            warm_s = self._wait_until_warm(launcher, interrupts)
            if note:
                self._notes.append(f"{note}, {warm_s:.1f} s")
            view.start(self._header())
            for text in self._session.late_warnings():
                view.warn(text)
            started = time.monotonic()
            done = self._follow(launcher, env, view, interrupts, waker)
            seconds = time.monotonic() - started
        finally:
            launcher.give_back()
        interrupted = interrupts.count > 0
        close_record(self._directory, RunState.KILLED if interrupted else RunState(done.state), done.reason)
        if self._tracked is not None:
            self._end_tracking(self._tracked, ok=done.state == RunState.FINISHED and not interrupted)
            self._show_tracked(view, self._tracked)
        link = self._link()
        view.header(f"{self._header()} · {done.state}", link)
        view.finish(_footer(done, seconds), link)
        return done, interrupted

    def _follow(
        self,
        launcher: LauncherClient,
        env: dict[str, str],
        view: CellView,
        interrupts: InterruptCounter,
        waker: _Waker,
    ) -> Done:
        run_id = self._directory.run_id
        events = launcher.run(Run(run_id, str(self._directory.path), self._nproc, env, self._options.timeout_s))
        waker.events = events
        if self._tracked is not None:
            self._tracked.begin()
        if interrupts.count:
            events.wake()
        try:
            waiter = RunWaiter(self._directory, self._nproc, events, launcher, view, interrupts)
            return waiter.wait(lambda: self._look_at_tracked(view))
        except BaseException:  # drawing failed: nobody follows the run any more
            end_run(launcher, run_id, events)
            raise
        finally:
            waker.events = None
            launcher.forget(run_id)

    def _look_at_tracked(self, view: CellView) -> None:
        """The tracking process answers in the run directory, at any time while the ranks run."""
        if self._tracked is not None and self._tracked.poll():
            self._show_tracked(view, self._tracked)
            view.header(self._header(), self._link())

    def _end_tracking(self, tracked: Tracked, *, ok: bool) -> None:
        tracked.end(ok=ok)
        if not tracked.is_settled:
            self._session.watch_tracking(tracked)

    @staticmethod
    def _show_tracked(view: CellView, tracked: Tracked) -> None:
        for text in tracked.warnings():
            view.warn(text)

    def _link(self) -> Link | None:
        return self._tracked.link() if self._tracked is not None else None

    def _write_files(self) -> dict[str, str]:
        self._ask_for_tracking()
        topology = self._placement.topology
        resume = None if self._options.resume is None else _absolute(self._options.resume)
        env, threads = environment_of(
            self._directory, self._name, topology, self._tracked, resume=resume, extra=self._options.env
        )
        facts = kernel_facts(self._shell, threads, self._captured.sources)
        hook = HOOK if self._tracked is not None else None
        fields: dict[str, Any] = {"header": "", "import_hook": hook, **facts, **self._launch.task}
        write_task(
            self._directory,
            RankTask(kind=self._launch.kind, run_name=self._name, source=self._launch.source, **fields),
        )
        self._captured.bundle.write(self._directory.path / PAYLOAD_FILE)
        self._directory.write_private("cell.py", mask_credentials(self._launch.source))
        options = asdict(self._options) | {"env": sorted(self._options.env)}
        write_first_record(self._directory, self._name, topology, options, source_name(self._user_ns()))
        return env

    def _ask_for_tracking(self) -> None:
        if not is_tracked(self._options):
            if note := self._session.once(untracked_note(self._options)):
                self._notes.append(note)
            return
        captured = {name: size for name, size in self._captured.sizes.items() if name in self._launch.names}
        request = tracking_request(self._options, self._name, self._placement.topology, captured, self._user_ns())
        self._tracked = Tracked(self._session.tracking, self._directory, request)

    def _user_ns(self) -> Mapping[str, Any]:
        return self._shell.user_ns if self._shell is not None else vars(sys.modules["__main__"])

    @staticmethod
    def _wait_until_warm(launcher: LauncherClient, interrupts: InterruptCounter) -> float:
        """Seconds until it was; an interrupt ends the waiting, not the warming."""
        started = time.monotonic()
        while not launcher.wait_ready(0.1):
            if interrupts.count:
                raise interruption("the launcher was still warming up, no rank was started")
            if time.monotonic() - started > _WARM_TIMEOUT_S:
                msg = f"the launcher was not ready after {_WARM_TIMEOUT_S:g} s.\n{launcher.log_tail()}"
                raise LauncherError(msg)
        return time.monotonic() - started

    def _header(self) -> str:
        topology = self._placement.topology
        where = "CPU (gloo)"
        if topology.device == "cuda":
            where = ", ".join(f"rank {rank} → {label}" for rank, label in enumerate(topology.gpu_labels))
        ranks = f"{self._nproc} rank{'s' if self._nproc != 1 else ''}"
        return " · ".join([f"run {self._name}", f"{ranks} on {where}", *self._notes])

    def _outcome(self, done: Done, *, interrupted: bool) -> list[dict[str, Any]]:
        values = load_values(self._directory, done.finished, self._nproc, self._captured.shipped)
        if done.state == RunState.FINISHED and not interrupted:
            self._directory.settle()
            return [value or {} for value in values]
        error = fail(
            done, self._directory, self._nproc, _results(values), self._captured.shipped, interrupted=interrupted
        )
        self._directory.settle()
        raise error


def _absolute(resume: str) -> str:
    """A rank may change its directory before it makes its manager. A bare name is one in the manager's root."""
    is_path = resume not in {"auto", "must", "never"} and "://" not in resume
    is_path = is_path and ("/" in resume or Path(resume).exists())
    return str(Path(resume).expanduser().absolute()) if is_path else resume


def _check_cwd() -> None:
    """Ranks start in the kernel's working directory.

    Raises:
        LauncherError: There is none any more.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        msg = "the kernel's working directory was removed: os.chdir(...) to one that exists, then run the cell again"
        raise LauncherError(msg) from None


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
