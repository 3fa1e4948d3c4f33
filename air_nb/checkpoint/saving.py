"""A save, from a snapshot to COMMIT: in a thread of its own, or at once.

On the training's thread: the snapshot is copied to the CPU. On the thread ``air_nb-checkpoint``, over a group of its
own: a fresh directory that all ranks see, the shards, a file of each rank, ``.metadata``, the manifest and COMMIT; then
old checkpoints go. One save is in flight; what goes wrong is kept for the next call.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from air_nb.checkpoint import commit, tensors
from air_nb.checkpoint.catalog import list_checkpoints, prune
from air_nb.checkpoint.differing import differing
from air_nb.checkpoint.events import CheckpointEvent, EventKind
from air_nb.checkpoint.group import Ranks
from air_nb.checkpoint.host_copy import HostCopy, local_part
from air_nb.checkpoint.manifest import WRITER_FILE, FileRecord, Manifest, record_of, versions
from air_nb.checkpoint.state import Snapshot
from air_nb.checkpoint.storage import VolumeWriter
from air_nb.checkpoint.store import open_store
from air_nb.checkpoint.values import encode, freeze
from air_nb.errors import CheckpointError
from air_nb.runs.checkpoints import record_checkpoint

if TYPE_CHECKING:
    import torch

__all__ = ["SaveReport", "Saver", "rank_file"]

_log = logging.getLogger(__name__)

_SEEN_WITHIN_S = 10.0  # network file systems show a new directory late


def rank_file(rank: int) -> str:
    """Name of a rank's own file in a checkpoint."""
    return f"rank_{rank}.state"


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A save that was committed.

    Attributes:
        step: Number of steps completed.
        path: Directory or URL of the checkpoint, as this rank sees it.
        stall_s: For how long it stopped the training.
        seconds: How long it took until it was committed.
        size_bytes: Size of all its files.
    """

    step: int
    path: str
    stall_s: float
    seconds: float
    size_bytes: int


@dataclass(slots=True)
class _Job:
    """One save on its way."""

    step: int
    snapshot: Snapshot
    parts: Mapping[str, torch.Tensor]
    rng: Any
    extra: Mapping[str, Any]
    began_at_s: float
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _RankFile:
    """What a rank tells of its own file."""

    record: FileRecord
    digests: Mapping[str, str]  # of each object in it, to see which are the same on all ranks


class Saver:
    """Saves checkpoints, one at a time. Made on every rank; ``save`` is collective.

    Args:
        root: Directory or URL of all checkpoints.
        ranks: All ranks, over a group that nobody else uses.
        keep: How many committed checkpoints stay.
        notify: Told what happens, on rank 0, from the thread that saves.
    """

    def __init__(self, root: str, ranks: Ranks, *, keep: int, notify: Callable[[CheckpointEvent], None]) -> None:
        self._root = root
        self._ranks = ranks
        self._keep = keep
        self._notify = notify
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._neighbours = _Neighbours(root)
        self.report: SaveReport | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a save has failed since ``wait`` was called last."""
        return self._error is not None

    def watch(self) -> None:
        """Remember what is in the root: what appears later and is not ours is another manager's. Rank 0 only."""
        self._neighbours.watch()

    def prepare(self, live: Mapping[str, torch.Tensor]) -> None:
        """Get the memory for a copy of these, in a thread: the first save in the background then stalls no longer."""
        self._copy.prepare(live)

    def save(
        self,
        step: int,
        snapshot: Snapshot,
        *,
        rng: Any,
        extra: Mapping[str, Any],
        background: bool,
        began_at_s: float,
    ) -> None:
        """Save a snapshot. Collective: every rank calls, and has waited for the save before.

        Args:
            step: Number of steps completed.
            snapshot: The training on this rank.
            rng: State of the rank's random number generators.
            extra: More for the manifest (JSON).
            background: Return once the snapshot is copied.
            began_at_s: When the training stopped for it, by the monotonic clock.

        Raises:
            CheckpointError: It failed, and not in the background.
        """
        assert self._thread is None, "one save at a time"
        live = snapshot.tensors
        parts = self._copy.copy(live) if background else {name: local_part(one) for name, one in live.items()}
        job = _Job(step, snapshot, parts, freeze(rng, "rng"), extra, began_at_s)
        if not background:
            self._run(job)
            self.wait()
            return
        job.stall_s = time.monotonic() - began_at_s
        # No daemon: a script that ends right after save() waits for it.
        self._thread = threading.Thread(target=self._run, args=(job,), name="air_nb-checkpoint")
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the save in flight, if any; False: it goes on.

        Raises:
            CheckpointError: It failed; raised once.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def close(self) -> None:
        """Let go of the group and of the memory of the copies."""
        self._ranks.close()
        self._copy.close()

    def _run(self, job: _Job) -> None:
        try:
            self.report = self._write(job)
        except Exception as error:  # noqa: BLE001 - the thread's border: wait() raises it
            self._error = error
            self._tell(CheckpointEvent(EventKind.SAVE_FAILED, job.step, None, str(error)))
            return
        if self._ranks.is_first:
            self._conclude(self.report)

    def _write(self, job: _Job) -> SaveReport:
        ranks, step = self._ranks, job.step
        name = ranks.broadcast(f"begin step_{step} in {self._root}", lambda: self._neighbours.begin(step))
        store = open_store(self._root).child(name)
        try:
            ranks.agree(f"see {name} on all machines", lambda: _must_see(store.url))
            plain = [one for one, tensor in job.snapshot.tensors.items() if not tensors.is_sharded(tensor)]
            own = differing({one: job.parts[one] for one in plain}, ranks)
            writer = VolumeWriter(store.url, commit=False)
            tensors.write(writer, job.snapshot.tensors, job.parts, ranks, of_first=own)
            of_ranks = ranks.agree(
                f"write the files of the ranks in {name}", lambda: self._write_own(store.url, job, own)
            )
            size_bytes = ranks.broadcast(f"commit {name}", lambda: self._commit(store.url, job, writer, of_ranks))
        except Exception as error:
            error.add_note(f"step {step} was not saved; what was saved before is as it was")
            if ranks.is_first:
                with contextlib.suppress(OSError):  # it is swept later
                    commit.remove(store)
            raise
        return SaveReport(step, store.url, self._stall_s(job), time.monotonic() - job.began_at_s, size_bytes)

    def _stall_s(self, job: _Job) -> float:
        return job.stall_s or time.monotonic() - job.began_at_s

    def _write_own(self, url: str, job: _Job, own_tensors: list[str]) -> _RankFile:
        own = job.snapshot.own
        if self._ranks.is_first:
            more = {"shared": job.snapshot.shared}
        else:
            more = {"tensors": freeze({name: job.parts[name] for name in own_tensors}, "tensors")}
        content = encode({"rng": job.rng, "own": own, **more})
        open_store(url).write(rank_file(self._ranks.rank), content)
        digests = {name: hashlib.sha256(encode(value)).hexdigest() for name, value in own.items()}
        return _RankFile(record_of(content), digests)

    def _commit(self, url: str, job: _Job, writer: VolumeWriter, of_ranks: list[_RankFile]) -> int:
        files = {rank_file(rank): one.record for rank, one in enumerate(of_ranks)} | writer.all_files
        first = of_ranks[0].digests
        alike = [name for name, digest in first.items() if all(one.digests.get(name) == digest for one in of_ranks)]
        manifest = Manifest(
            step=job.step,
            created_at=self._neighbours.next_time(),
            world_size=self._ranks.world_size,
            files=files,
            versions=versions(),
            data=job.snapshot.data,
            run_id=os.environ.get("AIR_NB_RUN_ID"),
            run_name=os.environ.get("AIR_NB_RUN_NAME"),
            mlflow_run_id=os.environ.get("MLFLOW_RUN_ID"),
            extra={**job.extra, "alike": alike},
        )
        commit.publish(open_store(url), manifest)
        return manifest.size_bytes()

    def _conclude(self, report: SaveReport) -> None:
        """What is left to do once the checkpoint is there; nothing of it can make the save fail any more."""
        try:
            record_checkpoint(
                report.path,
                report.step,
                stall_s=report.stall_s,
                seconds=report.seconds,
                size_bytes=report.size_bytes,
            )
        except OSError as error:
            _log.warning("step %d is saved, but the run could not note it: %s", report.step, error)
        message = f"saved step {report.step} to {report.path} ({report.size_bytes / 2**20:.1f} MiB)"
        self._tell(
            CheckpointEvent(
                EventKind.SAVED,
                report.step,
                report.path,
                message,
                seconds=report.seconds,
                stall_s=report.stall_s,
                size_bytes=report.size_bytes,
            )
        )
        try:
            prune(self._root, self._keep)
        except (OSError, CheckpointError) as error:
            message = f"old checkpoints in {self._root} could not be deleted: {error}"
            self._tell(CheckpointEvent(EventKind.RETENTION_FAILED, report.step, report.path, message))

    def _tell(self, event: CheckpointEvent) -> None:
        if event.kind in {EventKind.SAVE_FAILED, EventKind.RETENTION_FAILED}:
            _log.warning("%s", event.message)
        if self._ranks.is_first:
            self._notify(event)


def _must_see(url: str) -> None:
    """Refuse a directory that rank 0 has made on another machine's own disk."""
    store = open_store(url)
    deadline_s = time.monotonic() + _SEEN_WITHIN_S
    while not store.exists(WRITER_FILE):
        if time.monotonic() > deadline_s:
            msg = (
                f"{url} is not there, though rank 0 has just made it: the ranks do not share this directory. Give the "
                "manager a root that all machines see (a network file system, or a URL)"
            )
            raise CheckpointError(msg)
        time.sleep(0.1)


class _Neighbours:
    """What else is in the root, as rank 0 sees it.

    Two managers that save to one root would delete each other's checkpoints, and which one is gone on with would be
    chance. No lock could tell: those of dead processes on other machines stay for ever. Who writes there does.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: set[str] | None = None
        self._newest_at = 0.0

    def watch(self) -> None:
        if self._known is None:
            self._known = set(open_store(self._root).directories())
            self._newest_at = max((info.created_at or 0.0 for info in list_checkpoints(self._root)), default=0.0)

    def begin(self, step: int) -> str:
        """Make a directory and return its name, unless somebody else saves here."""
        self.watch()
        assert self._known is not None
        url = commit.begin(self._root, step)
        name = url.rstrip("/").rpartition("/")[2]
        self._known.add(name)
        # After making our own: of two that begin in one instant, at least one sees the other.
        store = open_store(self._root)
        strangers = [
            other for other in store.directories() if other not in self._known and commit.step_of(other) is not None
        ]
        alive = [other for other in strangers if commit.is_being_written(store.child(other))]
        if alive:
            commit.remove(open_store(url))
            msg = (
                f"another checkpoint manager saves to {self._root}: it has made {', '.join(sorted(alive))} since this "
                "one began. Give each training a root of its own"
            )
            raise CheckpointError(msg)
        self._known |= set(strangers)
        return name

    def next_time(self) -> float:
        """Now, but later than any checkpoint here: clocks differ, and the newest is the one to go on with."""
        self._newest_at = max(time.time(), self._newest_at + 1e-3)
        return self._newest_at
