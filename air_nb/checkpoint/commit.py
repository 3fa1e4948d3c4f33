"""The commit protocol: a fresh directory, its files, the manifest, COMMIT last; and the sweep of the rest. Torch-free.

1. ``begin``: a directory that was never used before, with ``writer.json`` in it, so that others know who writes.
2. Shards and the files of each rank, then ``.metadata`` (``volume_writer.py``, or whoever saves).
3. ``publish``: ``manifest.json``, then COMMIT by create-if-absent. From that moment on the checkpoint is valid.

Whatever happens before the last step leaves a directory without COMMIT, which is never chosen and is swept once its
writer has died, or, where that can't be told, when nothing in it has changed for a grace period.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from air_nb.checkpoint.manifest import (
    COMMIT_FILE,
    MANIFEST_FILE,
    METADATA_FILE,
    WRITER_FILE,
    FileRecord,
    Manifest,
    record_of,
)
from air_nb.checkpoint.store import Store, StoredFile, open_store, try_again
from air_nb.errors import CheckpointDamagedError, CheckpointError
from air_nb.runs.liveness import ProcessId

__all__ = [
    "GRACE_S",
    "begin",
    "is_being_written",
    "publish",
    "read_manifest",
    "remove",
    "step_by_name",
    "step_of",
    "sweep",
    "unpublish",
    "wrong_size",
    "wrong_sizes",
]

GRACE_S = 3600.0
"""A directory without COMMIT whose writer can't be asked is left alone until nothing in it has changed for so long."""

_LISTING_WAITS_S = (0.1, 0.5, 2.0, 5.0)
"""Network file systems show another machine's new files late."""

_STEP_DIRECTORY = re.compile(r"step_(\d+)\.[0-9a-f]{8}")


def step_of(name: str) -> int | None:
    """Number of steps by the name of a directory that ``begin`` made; None for any other name."""
    match = _STEP_DIRECTORY.fullmatch(name)
    return int(match[1]) if match else None


def step_by_name(name: str) -> int | None:
    """Number of steps by anybody's name of a directory: the last number in it (``epoch_3-step_1200``), None without."""
    numbers = re.findall(r"\d+", name)
    own = step_of(name)
    return own if own is not None else int(numbers[-1]) if numbers else None


def begin(root: str | os.PathLike[str], step: int) -> str:
    """Choose a fresh directory for a checkpoint and say that this process writes it. One rank calls it.

    Args:
        root: Directory or URL of all checkpoints.
        step: Number of steps completed.

    Returns:
        The checkpoint's own directory or URL, ``<root>/step_<n>.<8 hex>``.

    Raises:
        OSError: The root can't be written.
        CheckpointError: It is a file.
    """
    store = open_store(root)
    name = f"step_{step}.{secrets.token_hex(4)}"
    store.child(name).create(WRITER_FILE, json.dumps(_this_writer()).encode())
    return store.child(name).url


def publish(checkpoint: Store, manifest: Manifest) -> None:
    """Write the manifest, then COMMIT: the checkpoint is valid when this returns. One rank calls it, after all files.

    Raises:
        CheckpointError: Files of the manifest are not there as it says; seen from this rank's machine.
        FileExistsError: Somebody has committed this directory already.
        OSError: The storage refused; the checkpoint is not valid.
        TypeError: The manifest holds what JSON has no word for.
    """
    content = manifest.encode()
    _must_see(checkpoint, manifest.files)
    checkpoint.write(MANIFEST_FILE, content)
    # The token tells this COMMIT from any other, after an attempt whose answer was lost too.
    commit = json.dumps({"manifest": asdict(record_of(content)), "token": secrets.token_hex(8)}).encode() + b"\n"
    if checkpoint.is_remote:
        try_again(f"committing {checkpoint}", lambda: _create_commit(checkpoint, commit))
    else:
        _create_commit(checkpoint, commit)


def _create_commit(checkpoint: Store, content: bytes) -> None:
    try:
        checkpoint.create(COMMIT_FILE, content)
    except FileExistsError:
        if checkpoint.read(COMMIT_FILE) != content:
            raise


def _must_see(checkpoint: Store, records: Mapping[str, FileRecord]) -> None:
    """Refuse to commit what other machines wrote into a directory of their own, or what storage has lost."""
    for wait_s in _LISTING_WAITS_S:
        if not wrong_sizes(checkpoint.list(), records):
            return
        time.sleep(wait_s)
    if problems := wrong_sizes(checkpoint.list(), records):
        msg = (
            f"not committed: in {checkpoint}, seen from {socket.gethostname()}, {'; '.join(problems)}. If a rank on "
            "another machine wrote these, the directory is not shared: give a root that all machines see"
        )
        raise CheckpointError(msg)


def wrong_sizes(files: Mapping[str, StoredFile], records: Mapping[str, FileRecord]) -> tuple[str, ...]:
    """Say which files of a listing are missing or have another size than recorded."""
    return tuple(
        f"{name} is missing" if name not in files else wrong_size(name, files[name].size_bytes, record)
        for name, record in sorted(records.items())
        if name not in files or files[name].size_bytes != record.size_bytes
    )


def wrong_size(name: str, size_bytes: int, record: FileRecord) -> str:
    """Say that a file has another size than recorded."""
    return f"{name} has {size_bytes} bytes, not {record.size_bytes}"


def unpublish(checkpoint: Store) -> None:
    """Make a directory that is to be written again count as incomplete first: never COMMIT of one, bytes of another."""
    for name in (COMMIT_FILE, MANIFEST_FILE, METADATA_FILE):
        checkpoint.delete(name)


def remove(checkpoint: Store) -> None:
    """Delete a checkpoint, COMMIT first: whatever interrupts this, what is left never counts as valid or as damaged."""
    checkpoint.delete(COMMIT_FILE)
    checkpoint.delete()


def read_manifest(checkpoint: Store) -> Manifest | None:
    """The manifest of a committed checkpoint; None if it has no COMMIT.

    Raises:
        CheckpointDamagedError: The manifest is missing, or is not the one that was committed.
        CheckpointMismatchError: A newer air_nb wrote it.
        OSError: The storage can't be read.
    """
    try:
        commit = checkpoint.read(COMMIT_FILE)
    except FileNotFoundError:
        return None
    if not commit.strip():  # made and not filled: its writer died in between
        return None
    try:
        expected = FileRecord(**json.loads(commit)["manifest"])
    except (ValueError, TypeError, KeyError) as error:
        msg = f"{COMMIT_FILE} ({len(commit)} bytes) is not what air_nb writes: {error!r}"
        raise CheckpointDamagedError(msg) from error
    try:
        content = checkpoint.read(MANIFEST_FILE)
    except FileNotFoundError as error:
        msg = f"{MANIFEST_FILE} is missing though {COMMIT_FILE} is there"
        raise CheckpointDamagedError(msg) from error
    if record_of(content, expected.algorithm) != expected:
        msg = f"{MANIFEST_FILE} ({len(content)} bytes) is not the one that was committed ({expected.size_bytes} bytes)"
        raise CheckpointDamagedError(msg)
    return Manifest.decode(content)


def sweep(root: str | os.PathLike[str], *, grace_s: float = GRACE_S) -> tuple[str, ...]:
    """Delete directories without COMMIT that nobody writes any more; returns their names.

    Only directories that ``begin`` has named are looked at. One rank calls it.

    Raises:
        OSError: The storage refused.
    """
    store = open_store(root)
    swept = []
    for name in store.directories():
        checkpoint = store.child(name)
        if step_of(name) is None or checkpoint.exists(COMMIT_FILE) or is_being_written(checkpoint, grace_s=grace_s):
            continue
        if checkpoint.list():  # else it is only a name, which a mount of an object store may keep showing
            swept.append(name)
        remove(checkpoint)
    return tuple(swept)


def is_being_written(checkpoint: Store, *, grace_s: float = GRACE_S) -> bool:
    """Whether somebody may still be writing a directory without COMMIT.

    Its writer is asked if it ran on this machine; else the newest change of a file decides.
    """
    try:
        alive = _writer_is_alive(checkpoint.read(WRITER_FILE))
    except FileNotFoundError:
        alive = None
    if alive is not None:
        return alive
    changes = [file.modified_at for file in checkpoint.list().values()]
    if not changes and checkpoint.path is not None:
        changes = [checkpoint.path.stat().st_mtime]
    # A time that the storage does not tell can't be too long ago.
    return any(at is None or time.time() - at < grace_s for at in changes)


def _this_writer() -> dict[str, str | int]:
    process = ProcessId.own()
    return {**_this_machine(), "pid": process.pid, "started_ticks": process.started_ticks}


def _this_machine() -> dict[str, str | int]:
    """What makes a pid mean the same process: the boot and the pid namespace (containers share the former)."""
    return {
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": os.stat("/proc/self/ns/pid").st_ino,  # noqa: PTH116 - Path.stat would do; one call, one line
    }


def _writer_is_alive(content: bytes) -> bool | None:
    """Whether the process named by a ``writer.json`` still runs; None if that can't be told from here."""
    try:
        writer = json.loads(content)
        process = ProcessId(int(writer["pid"]), int(writer["started_ticks"]))
        here = all(writer[key] == value for key, value in _this_machine().items())
    except (ValueError, TypeError, KeyError):  # torn
        return None
    return process.is_alive() if here else None
