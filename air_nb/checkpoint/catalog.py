"""Which checkpoints are there, which is the newest that can be loaded, and which may go. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

from air_nb.checkpoint.commit import (
    GRACE_S,
    is_being_written,
    read_manifest,
    remove,
    step_by_name,
    step_of,
    wrong_sizes,
)
from air_nb.checkpoint.manifest import COMMIT_FILE, METADATA_FILE, Manifest
from air_nb.checkpoint.store import Store, StoredFile, open_store
from air_nb.checkpoint.verify import Verdict, in_parallel, verify
from air_nb.errors import CheckpointDamagedError, CheckpointError

__all__ = ["CheckpointInfo", "CheckpointState", "Verdict", "find_latest_valid", "list_checkpoints", "prune", "verify"]

_MIN_KEPT = 2
"""One that is damaged unnoticed must not be the only one."""


class CheckpointState(StrEnum):
    """What can be said of a checkpoint without reading its bytes.

    A directory is INCOMPLETE until COMMIT is created, then COMMITTED; DAMAGED means that since then a file has vanished
    or changed its size, or that this air_nb can't read or check its manifest. FOREIGN has torch's ``.metadata``, but
    nobody committed it: whether it is complete is known only as far as sizes tell.
    """

    COMMITTED = "committed"
    FOREIGN = "foreign"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint in a listing.

    Attributes:
        path: Its own directory or URL.
        step: Number of steps completed; by its name where there is no manifest, None if that says nothing.
        created_at: UTC seconds since the epoch; None if unknown.
        size_bytes: Sum of its files.
        world_size: Number of ranks that wrote it; None if unknown.
        run_id: Run of air_nb that wrote it, if any.
        run_name: Its name.
        state: Whether it can be loaded: COMMITTED and FOREIGN can.
        reason: Why it can't be; empty if it can.
    """

    path: str
    step: int | None
    created_at: float | None
    size_bytes: int
    world_size: int | None
    run_id: str | None
    run_name: str | None
    state: CheckpointState
    reason: str = ""

    @property
    def is_valid(self) -> bool:
        """Whether it can be loaded, as far as sizes tell."""
        return self.state in {CheckpointState.COMMITTED, CheckpointState.FOREIGN}


def list_checkpoints(root: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """List the checkpoints directly in a directory or under a URL, newest first.

    By the time of their commit, not by step: a training that was started afresh counts from 0 again, and it is the one
    to go on with. Those that don't tell their time come last, the highest step first. Reads manifests and directory
    listings, no shards. A root that does not exist has none.

    Raises:
        CheckpointError: The root is a file.
        OSError: It can't be read.
    """
    store = open_store(root)
    found = in_parallel(lambda name: describe(store.child(name), name), store.directories())
    return sorted(found, key=lambda info: (_or_least(info.created_at), _or_least(info.step)), reverse=True)


def find_latest_valid(root: str | os.PathLike[str]) -> CheckpointInfo | None:
    """Find the checkpoint to resume from: the first of ``list_checkpoints`` that can be loaded; None if there is none.

    Raises:
        CheckpointError: The root is a file.
        OSError: It can't be read.
    """
    return next((info for info in list_checkpoints(root) if info.is_valid), None)


def describe(checkpoint: Store, name: str) -> CheckpointInfo | None:
    """Look at one directory; None if it is no checkpoint.

    Args:
        checkpoint: Its store.
        name: Its name, which may tell the step.

    Raises:
        OSError: It can't be read.
    """
    files = checkpoint.list()
    if COMMIT_FILE not in files and METADATA_FILE not in files and (step_of(name) is None or not files):
        return None
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return _without_manifest(checkpoint, name, files, CheckpointState.DAMAGED, str(error))
    if manifest is not None:
        return _with_manifest(checkpoint, manifest, files)
    # Ours that lacks COMMIT was never finished, whatever else is there.
    if METADATA_FILE not in files or step_of(name) is not None:
        reason = "it was never completed, or is being written"
        return _without_manifest(checkpoint, name, files, CheckpointState.INCOMPLETE, reason)
    verdict = verify(checkpoint.url)
    state = CheckpointState.FOREIGN if verdict.ok else CheckpointState.DAMAGED
    return _without_manifest(checkpoint, name, files, state, "; ".join(verdict.problems))


def _with_manifest(checkpoint: Store, manifest: Manifest, files: dict[str, StoredFile]) -> CheckpointInfo:
    problems = wrong_sizes(files, manifest.files)
    return CheckpointInfo(
        path=checkpoint.url,
        step=manifest.step,
        created_at=manifest.created_at,
        size_bytes=sum(file.size_bytes for file in files.values()),
        world_size=manifest.world_size,
        run_id=manifest.run_id,
        run_name=manifest.run_name,
        state=CheckpointState.DAMAGED if problems else CheckpointState.COMMITTED,
        reason="; ".join(problems),
    )


def _without_manifest(
    checkpoint: Store, name: str, files: dict[str, StoredFile], state: CheckpointState, reason: str
) -> CheckpointInfo:
    changes = [file.modified_at for file in files.values() if file.modified_at is not None]
    return CheckpointInfo(
        path=checkpoint.url,
        step=step_by_name(name),
        created_at=max(changes, default=None),
        size_bytes=sum(file.size_bytes for file in files.values()),
        world_size=None,
        run_id=None,
        run_name=None,
        state=state,
        reason=reason,
    )


def _or_least(value: float | None) -> float:
    return float("-inf") if value is None else value


def prune(root: str | os.PathLike[str], keep: int, *, dry_run: bool = False, grace_s: float = GRACE_S) -> list[str]:
    """Delete all checkpoints but the newest, and what was never completed.

    Checkpoints of others (no COMMIT of ours) are neither deleted nor counted. Never deleted: the newest 2 that verify,
    and a directory that somebody may still be writing.

    Args:
        root: Directory or URL of all checkpoints.
        keep: How many committed ones stay; damaged ones don't count.
        dry_run: Only tell.
        grace_s: See ``commit.sweep``.

    Returns:
        Paths of what was, or would be, deleted.

    Raises:
        ValueError: ``keep`` is negative.
        CheckpointError: The root is a file.
        OSError: The storage refused.
    """
    if keep < 0:
        msg = f"keep={keep}: a number of checkpoints to keep, at least 0 (2 always stay)"
        raise ValueError(msg)
    kept, doomed = 0, []
    for info in list_checkpoints(root):
        checkpoint = open_store(info.path)
        match info.state:
            case CheckpointState.COMMITTED:
                kept += 1
                may_go = kept > max(keep, _MIN_KEPT)
            case CheckpointState.DAMAGED:
                # Not before enough good ones are newer, and never what only this air_nb can't read.
                may_go = kept >= max(keep, _MIN_KEPT) and checkpoint.exists(COMMIT_FILE) and _is_damaged(checkpoint)
            case CheckpointState.INCOMPLETE:
                may_go = not is_being_written(checkpoint, grace_s=grace_s)
            case CheckpointState.FOREIGN:
                may_go = False
        if may_go:
            doomed.append(info.path)
    # Only now: had the listing failed half-way, nothing would have been deleted.
    for path in [] if dry_run else doomed:
        remove(open_store(path))
    return doomed


def _is_damaged(checkpoint: Store) -> bool:
    """Whether files are wrong, and not only of a newer air_nb or in need of a package that is not installed here."""
    try:
        read_manifest(checkpoint)
    except CheckpointDamagedError:
        return True
    except CheckpointError:
        return False
    return True
