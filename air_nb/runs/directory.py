"""One run, one directory: the source of truth of ``%air runs``, ``%air logs`` and ``%air stop``.

``run.json`` is written by the kernel first (STARTING) and by the launcher from then on, always by rename, so a reader
sees a whole record. Whoever finds a record that isn't final while its launcher is gone may close it as KILLED.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from air_nb.protocol.messages import RunState
from air_nb.protocol.task import PAYLOAD_FILE
from air_nb.runs.liveness import ProcessId
from air_nb.runs.paths import home, is_network_path, node_local, private_directory

__all__ = ["RECORD_FILE", "RunDirectory", "RunRecord", "all_runs", "find_run", "locate", "make_run_name", "run_roots"]

RECORD_FILE = "run.json"
_STOP_FILE = "stop"
_ADJECTIVES = (
    "amber brave calm clear eager fair gentle happy keen kind "
    "lively lucky mellow noble proud quick quiet swift vivid warm"
).split()
_ANIMALS = (
    "badger crane dolphin falcon fox gecko heron ibis koala lynx "
    "marten newt otter panda puffin raven seal tapir vole wren"
).split()


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What is known of a run; times in UTC seconds since the epoch.

    Attributes:
        run_id: Unique id, also the directory's name.
        name: Readable name.
        state: See ``RunState``.
        created_at: When the user launched it.
        started_at: When all ranks had been forked.
        ended_at: When no process of it was left.
        nproc: Number of ranks.
        device: ``"cuda"`` or ``"cpu"``.
        gpu_uuids: The GPUs, index = local rank.
        options: What the user asked for, without the values of environment variables.
        kernel: Kernel that launched it.
        launcher: Launcher that ran it.
        ranks: Process of each rank in the current attempt; None for one that had ended before it could be looked at.
        attempt: 0, or the number of restarts.
        failures: ``RankFailure`` fields, the cause first.
        reason: Why it was stopped.
        notebook: Notebook or script that its code is from; None if that is unknown.
        python: Version of the Python that made its payload; empty in records of before this was noted.
        protocol: ``PROTOCOL_VERSION`` of the air_nb that made it.
        resumed_from: Run whose payload it runs again, from a checkpoint.
    """

    run_id: str
    name: str
    state: RunState
    created_at: float
    nproc: int
    device: str
    gpu_uuids: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    kernel: ProcessId | None = None
    launcher: ProcessId | None = None
    started_at: float | None = None
    ended_at: float | None = None
    ranks: list[ProcessId | None] = field(default_factory=list)
    attempt: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""
    notebook: str | None = None
    python: str = ""
    protocol: int = 0
    resumed_from: str | None = None

    @property
    def is_live(self) -> bool:
        """Whether it is not final and whoever runs it is alive."""
        if self.state.is_final:
            return False
        owner = self.launcher or self.kernel
        return owner is not None and owner.is_alive()


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls) -> RunDirectory:
        """Make the private directory of a new run; its name sorts by time."""
        root = private_directory((node_local() if is_network_path(home()) else home()) / "runs")
        run_id = time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(4)
        path = root / run_id
        path.mkdir(mode=0o700)
        return cls(path)

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.path.name

    def rank_file(self, rank: int, suffix: str) -> Path:
        """``rank_<r>.<suffix>``."""
        return self.path / f"rank_{rank}.{suffix}"

    def write_private(self, name: str, text: str) -> Path:
        """Write a file that only this user can read, by temporary name and rename."""
        path = self.path / name
        temporary = self.path / f".{name}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return path

    def write_record(self, record: RunRecord) -> None:
        """Replace ``run.json``."""
        self.write_private(RECORD_FILE, json.dumps(asdict(record), indent=1))

    def update_record(self, **changes: Any) -> RunRecord:
        """Change fields of ``run.json``; one writer at a time (see the module)."""
        record = replace(self.read_record(), **changes)
        self.write_record(record)
        return record

    def close_record(self, **changes: Any) -> RunRecord:
        """``update_record`` for the end of the run: on a full disk the payload, which nobody needs now, makes room."""
        try:
            return self.update_record(**changes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            (self.path / PAYLOAD_FILE).unlink(missing_ok=True)
            return self.update_record(**changes)

    def read_record(self) -> RunRecord:
        """Read ``run.json``.

        Raises:
            FileNotFoundError: No run was recorded here.
            ValueError: It is not a record of this version.
        """
        try:
            values = json.loads((self.path / RECORD_FILE).read_text())
            values["state"] = RunState(values["state"])
            for owner in ("kernel", "launcher"):
                values[owner] = _process(values[owner])
            values["ranks"] = [_process(rank) for rank in values["ranks"]]
            return RunRecord(**values)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            msg = f"{self.path / RECORD_FILE} is not the record of a run: {error}"
            raise ValueError(msg) from error

    def request_stop(self, reason: str) -> None:
        """Ask the run's launcher to stop it, from any process of this user."""
        try:
            self.write_private(_STOP_FILE, reason)
        except OSError:
            # A run that has filled the disk is one that somebody wants to stop: a file without text needs no room.
            (self.path / _STOP_FILE).touch(mode=0o600)

    def stop_requested(self) -> str | None:
        """The reason given to ``request_stop``, else None."""
        try:
            return (self.path / _STOP_FILE).read_text() or "stopped while the disk was full"
        except FileNotFoundError:
            return None

    def settle(self) -> RunDirectory:
        """Move a run that has ended home from the node-local directory; returns where it is now.

        Where the home is full it stays, and is found where it is; a later kernel tries again.
        """
        final = private_directory(home() / "runs") / self.run_id
        if final != self.path:
            try:
                shutil.move(self.path, final)
            except OSError:
                if self.path.exists():
                    shutil.rmtree(final, ignore_errors=True)  # else the next attempt would move into the half of it
                return self
        return RunDirectory(final)


def _process(values: dict[str, int] | None) -> ProcessId | None:
    return ProcessId(**values) if values else None


def locate(path: Path) -> RunDirectory:
    """The directory of a run, also after the kernel has moved it home from the node-local directory."""
    return RunDirectory(path if path.exists() else home() / "runs" / path.name)


def run_roots() -> list[Path]:
    """Where run directories are, those of live runs first."""
    return [root for root in dict.fromkeys((node_local() / "runs", home() / "runs")) if root.is_dir()]


def all_runs() -> list[tuple[RunDirectory, RunRecord]]:
    """Every readable run of this user on this machine, newest first."""
    found = []
    for path in [path for root in run_roots() for path in root.iterdir()]:
        directory = RunDirectory(path)
        try:
            found.append((directory, directory.read_record()))
        except (OSError, ValueError):  # another process is making or deleting it, or it is no run
            continue
    return sorted(found, key=lambda run: run[1].created_at, reverse=True)


def find_run(wanted: str) -> tuple[RunDirectory, RunRecord]:
    """The newest run with this name, id or beginning of an id.

    Raises:
        LookupError: There is none.
    """
    for directory, record in all_runs():
        if wanted in (record.name, record.run_id) or (wanted and record.run_id.startswith(wanted)):
            return directory, record
    msg = f"no run is called {wanted!r}: `%air runs` lists them"
    raise LookupError(msg)


def make_run_name() -> str:
    """A readable name such as ``calm-otter-41``."""
    return f"{secrets.choice(_ADJECTIVES)}-{secrets.choice(_ANIMALS)}-{secrets.randbelow(90) + 10}"
