"""A recorded run, launched again from a checkpoint without a cell: its output is in its log only.

``relaunch`` prepares the run on the calling thread, so that whoever asked is told at once what is wrong. A thread
``air_nb-resume-<run>`` then waits for the launcher and for the end of the run. The notebook's interrupts don't reach
it: signals go to the main thread, and the launcher has a session of its own. ``%air stop``, ``stop`` and the end of the
kernel do.

What such a run returns, or would be pulled from it, is dropped: there is no cell to take it.
"""

from __future__ import annotations

import os
import platform
import re
import select
import shutil
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from air_nb.errors import LauncherError, RunError
from air_nb.launch.client import RunEvents
from air_nb.options import RunOptions
from air_nb.protocol.messages import PROTOCOL_VERSION, Done, Kill, Refused, Run, RunState
from air_nb.protocol.task import PAYLOAD_FILE, TASK_FILE, RankTask
from air_nb.protocol.tracking import REQUEST_FILE, TrackingRequest
from air_nb.runs.directory import RunDirectory, RunRecord, all_runs
from air_nb.session.devices import place
from air_nb.session.mlflow_state import tracking_request
from air_nb.session.run_files import (
    close_record,
    environment_of,
    remembered_env,
    unwritable_is_explained,
    write_first_record,
    write_task,
)
from air_nb.session.tracked import HOOK, Tracked, is_tracked

if TYPE_CHECKING:
    from collections.abc import Collection

    from air_nb.launch.client import LauncherClient
    from air_nb.session.session import Session
    from air_nb.topology import Topology

__all__ = ["BackgroundRun", "next_name", "relaunch", "why_not"]

_WARM_TIMEOUT_S = 300.0
_LOOK_S = 0.1
_WAIT_S = 5.0
_NAME_MAX = 116
_CLOSED = "the extension was unloaded"


def why_not(directory: RunDirectory, record: RunRecord) -> str:
    """Why a run can't be launched again, as the end of a sentence; empty if it can. Looks at files' names only."""
    if record.is_live:
        return "it has not ended: stop it first"
    if record.protocol != PROTOCOL_VERSION:
        return "another version of air_nb recorded it"
    if _minor(record.python) != _minor(platform.python_version()):
        return f"its payload is of Python {record.python}, this kernel is Python {platform.python_version()}"
    if remembered_env(record) is None:
        names = ", ".join(record.options["env"])
        return f"it had --env {names}, whose values only the kernel knows that launched it"
    if not all((directory.path / name).exists() for name in (PAYLOAD_FILE, TASK_FILE)):
        return "its payload is gone: it made room for the record on a full disk"
    return ""


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def relaunch(session: Session, directory: RunDirectory, record: RunRecord, checkpoint: str) -> BackgroundRun:
    """Launch a run's payload again, on as many ranks as before, with a checkpoint to go on from.

    Args:
        session: The session of this kernel, whose environment the ranks get.
        directory: The recorded run.
        record: Its record.
        checkpoint: Directory or URL.

    Returns:
        The new run; it goes on by itself.

    Raises:
        RunError: The payload can't be run here; the message says why.
        DeviceError: The devices are not there or not free.
        LauncherError: The run can't be written, or no launcher be started.
    """
    if why := why_not(directory, record) or _why_not_twice(record):
        raise RunError(_refusal(record, why), run_id=record.run_id)
    task = _read_task(directory, record)
    options = _options(record, checkpoint)
    name = next_name(record, {known.name for _, known in all_runs()})
    placement = place(options, session.sampler, f"pid {os.getpid()}, run {name}")
    with ExitStack() as held:
        held.enter_context(placement.held)
        run = BackgroundRun(session, _Recorded(directory, record, task), options, placement.topology, name)
        run.start(held.pop_all())
    return run


def _why_not_twice(record: RunRecord) -> str:
    """Two runs of one payload would write checkpoints to one root."""
    again = (other for _, other in all_runs() if other.resumed_from == record.run_id and other.is_live)
    return next((f"that was done, and run {other.name} has not ended: stop it first" for other in again), "")


class _Recorded:
    """The run whose payload it is."""

    def __init__(self, directory: RunDirectory, record: RunRecord, task: RankTask) -> None:
        self.directory = directory
        self.record = record
        self.task = task

    def request(self, options: RunOptions, name: str, topology: Topology) -> TrackingRequest:
        """The MLflow run to ask for: in the same experiment, also if another notebook launched it."""
        try:
            old = TrackingRequest.decode((self.directory.path / REQUEST_FILE).read_text())
        except (OSError, ValueError):  # it was not tracked
            return tracking_request(options, name, topology, {}, {})
        return replace(old, run_name=name)


class BackgroundRun:
    """See the module. ``stop`` and ``join`` may be called on any thread.

    Raises:
        LauncherError: The run can't be written, or no launcher be started; nothing is left behind.
    """

    def __init__(
        self, session: Session, recorded: _Recorded, options: RunOptions, topology: Topology, name: str
    ) -> None:
        self._session = session
        self._options = options
        self._nproc = topology.world_size
        self._name = name
        self._closing = threading.Event()
        self._tracked: Tracked | None = None
        with unwritable_is_explained():
            self._directory = RunDirectory.create()
            try:
                self._env = self._write_files(recorded, topology)
            except BaseException:
                shutil.rmtree(self._directory.path, ignore_errors=True)  # no run: nothing was started
                raise
        self._held = ExitStack()
        self._launcher: LauncherClient | None = None
        self._thread = threading.Thread(target=self._main, name=f"air_nb-resume-{self.run_id}", daemon=True)

    @property
    def run_id(self) -> str:
        """Id of the new run."""
        return self._directory.run_id

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left."""
        return not self._thread.is_alive()

    def start(self, held: ExitStack) -> None:
        """Go on in the background.

        Args:
            held: Closed when no process of the run is left.

        Raises:
            LauncherError: There is no launcher, and none can be started.
        """
        try:
            # Here and not on the thread: a session that is closed meanwhile must not be given a new launcher.
            self._launcher, _ = self._session.borrow_launcher(cold=False)
            self._held = held
            self._thread.start()
        except BaseException:
            if self._launcher is not None:
                self._launcher.give_back()
            held.close()
            shutil.rmtree(self._directory.path, ignore_errors=True)
            raise

    def stop(self) -> None:
        """End every rank now; returns at once."""
        self._closing.set()
        if self._launcher is not None:
            self._launcher.send(Kill(self.run_id, _CLOSED))

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        self._thread.join(timeout_s)

    # -- on the calling thread ---------------------------------------------------------------------------------------

    def _write_files(self, recorded: _Recorded, topology: Topology) -> dict[str, str]:
        if is_tracked(self._options):
            request = recorded.request(self._options, self._name, topology)
            self._tracked = Tracked(self._session.tracking, self._directory, request)
        env, threads = environment_of(
            self._directory,
            self._name,
            topology,
            self._tracked,
            resume=self._options.resume,
            extra=remembered_env(recorded.record) or {},
        )
        hook = HOOK if self._tracked is not None else None
        task = replace(recorded.task, run_name=self._name, threads=threads, import_hook=hook, out=None, pull=[])
        write_task(self._directory, task)
        for file in (PAYLOAD_FILE, "cell.py"):
            copy = self._directory.path / file
            copy.touch(mode=0o600)
            shutil.copyfile(recorded.directory.path / file, copy)
        record = recorded.record
        options = record.options | {"resume": self._options.resume, "name": self._name}
        write_first_record(self._directory, self._name, topology, options, record.notebook, resumed_from=record.run_id)
        return env

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        with self._session.live_run():
            self._run()

    def _run(self) -> None:
        assert self._launcher is not None
        try:
            with self._held:
                state, reason = self._follow(self._launcher)
        except Exception as error:  # noqa: BLE001 - the border of the thread: the record says what went wrong
            state, reason = RunState.FAILED, f"{type(error).__name__}: {error}"
        self._launcher.give_back()
        close_record(self._directory, state, reason)
        if self._tracked is not None:
            self._tracked.end(ok=state == RunState.FINISHED)
            if not self._tracked.is_settled:
                self._session.watch_tracking(self._tracked)
        for rank in range(self._nproc):
            self._directory.rank_file(rank, "result").unlink(missing_ok=True)
        with suppress(OSError):  # it stays where it is, and is found there
            self._directory.settle()

    def _follow(self, launcher: LauncherClient) -> tuple[RunState, str]:
        """How it ended, and why."""
        if reason := self._wait_until_warm(launcher):
            return RunState.KILLED, reason
        run = Run(self.run_id, str(self._directory.path), self._nproc, self._env, self._options.timeout_s)
        events = launcher.run(run)
        try:
            if self._tracked is not None:
                self._tracked.begin()
            if self._closing.is_set():  # `stop` may have come before the launcher knew the run
                launcher.send(Kill(self.run_id, _CLOSED))
            return _ending(events)
        finally:
            launcher.forget(self.run_id)

    def _wait_until_warm(self, launcher: LauncherClient) -> str:
        """Why the run is not wanted any more; empty when the launcher is warm."""
        left = int(_WARM_TIMEOUT_S / _LOOK_S)
        while not launcher.wait_ready(_LOOK_S):
            if self._closing.is_set():
                return _CLOSED
            if (reason := self._directory.stop_requested()) is not None:
                return reason
            left -= 1
            if not left:
                msg = f"the launcher was not ready after {_WARM_TIMEOUT_S:g} s.\n{launcher.log_tail()}"
                raise LauncherError(msg)
        return ""


def _ending(events: RunEvents) -> tuple[RunState, str]:
    """Wait for it; the launcher's own death is an event too."""
    ready = select.poll()
    ready.register(events.reader, select.POLLIN)
    while True:
        if ready.poll(_WAIT_S * 1000):
            events.drain()
        for event in events.take():
            if isinstance(event, Done):
                return RunState(event.state), event.reason
            if isinstance(event, Refused):
                return RunState.FAILED, event.reason


def _read_task(directory: RunDirectory, record: RunRecord) -> RankTask:
    try:
        task = RankTask.read(directory.path)
    except (OSError, ValueError, TypeError) as error:
        raise RunError(_refusal(record, f"its task.json can't be read: {error}"), run_id=record.run_id) from error
    if not Path(task.cwd).is_dir():
        why = f"its working directory {task.cwd} is not there any more"
        raise RunError(_refusal(record, why), run_id=record.run_id)
    return task


def _refusal(record: RunRecord, why: str) -> str:
    return f"run {record.name} can't be launched again: {why}. In a cell, --resume goes on from a checkpoint"


def _options(record: RunRecord, checkpoint: str) -> RunOptions:
    """Placement as the user asked for it then, on the same number of ranks; the GPUs themselves only if they chose."""
    old = record.options
    options = RunOptions(
        timeout_s=old.get("timeout_s"),
        experiment=old.get("experiment"),
        tracking=old.get("tracking", True),
        resume=checkpoint,
    )
    if record.device == "cpu":
        return replace(options, nproc=record.nproc, device="cpu")
    ids = tuple(record.gpu_uuids) if old.get("gpu_ids") else None
    return replace(options, gpus=record.nproc, gpu_ids=ids, gpu_type=old.get("gpu_type"), device="cuda")


def next_name(record: RunRecord, taken: Collection[str]) -> str:
    """``calm-otter-41`` -> ``calm-otter-41-2``, and of that ``calm-otter-41-3``: the first that is free."""
    base = re.sub(r"-\d+$", "", record.name) if record.resumed_from else record.name
    number = 2
    while f"{base[:_NAME_MAX]}-{number}" in taken:
        number += 1
    return f"{base[:_NAME_MAX]}-{number}"
