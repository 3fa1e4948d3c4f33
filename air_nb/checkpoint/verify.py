"""Is a checkpoint what was committed? Sizes always, digests on request. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from air_nb.checkpoint.commit import read_manifest, wrong_size, wrong_sizes
from air_nb.checkpoint.manifest import COMMIT_FILE, METADATA_FILE, Digest, FileRecord
from air_nb.checkpoint.restricted import load_layout
from air_nb.checkpoint.store import Store, open_store
from air_nb.errors import CheckpointError

__all__ = ["Verdict", "damage", "in_parallel", "verify"]

_T = TypeVar("_T")
_R = TypeVar("_R")
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ``verify`` found.

    Attributes:
        ok: Whether the checkpoint may be loaded.
        problems: One sentence each; empty if it may.
    """

    ok: bool
    problems: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ok


def verify(path: str | os.PathLike[str], *, deep: bool = False) -> Verdict:
    """Check a checkpoint against its manifest; one that only torch wrote (no manifest) against its ``.metadata``.

    Args:
        path: The checkpoint's own directory or URL.
        deep: Read every byte and compare digests, too.

    Raises:
        CheckpointError: The path is a file.
        OSError: The storage can't be read.
    """
    store = open_store(path)
    try:
        manifest = read_manifest(store)
        if manifest is None:
            return _verify_foreign(store)
        problems = wrong_sizes(store.list(), manifest.files)
        if deep and not problems:
            problems = in_parallel(lambda item: damage(store, *item), manifest.files.items())
    except CheckpointError as error:
        problems = (str(error),)
    return Verdict(not problems, problems)


def _verify_foreign(store: Store) -> Verdict:
    try:
        layout = load_layout(store.read(METADATA_FILE))
    except FileNotFoundError:
        return Verdict(False, (f"there is neither {COMMIT_FILE} nor {METADATA_FILE}: it was never completed",))  # noqa: FBT003
    files = store.list()
    problems = tuple(
        f"{name} is missing" if name not in files else f"{name} has {files[name].size_bytes} bytes, not {needed}"
        for name, needed in sorted(layout.file_sizes_bytes.items())
        if name not in files or files[name].size_bytes < needed
    )
    return Verdict(not problems, problems)


def damage(store: Store, name: str, record: FileRecord, sink: Callable[[bytes], object] | None = None) -> str | None:
    """Read a file and say what is wrong with it; None if nothing is.

    Args:
        store: Where the file is.
        name: The file.
        record: What was committed.
        sink: Gets the bytes as they go by.

    Raises:
        OSError: The storage can't be read.
        CheckpointError: The digest needs a package that is not installed.
    """
    digest = Digest(record.algorithm)
    try:
        for block in store.blocks(name):
            digest.update(block)
            if sink is not None:
                sink(block)
    except FileNotFoundError:
        return f"{name} is missing"
    found = digest.record()
    if found.size_bytes != record.size_bytes:
        return wrong_size(name, found.size_bytes, record)
    return None if found == record else f"{name} is not what was written: {record.algorithm} {found.digest}"


def in_parallel(action: Callable[[_T], _R | None], items: Iterable[_T]) -> tuple[_R, ...]:
    """Apply a function to all items on a few threads; returns what is not None, in the order of the items.

    Raises:
        Exception: The first that a call raised, after all have ended.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="air_nb-checkpoint-read") as pool:
        found = list(pool.map(action, items))
    return tuple(one for one in found if one is not None)
