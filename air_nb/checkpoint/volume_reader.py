"""``VolumeReader``: torch's FileSystemReader that finds a wrong byte before any rank touches a tensor."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from air_nb.checkpoint.commit import read_manifest
from air_nb.checkpoint.manifest import METADATA_FILE, FileRecord, record_of
from air_nb.checkpoint.restricted import load_metadata
from air_nb.checkpoint.stage import Stage
from air_nb.checkpoint.store import BLOCK_BYTES, open_store
from air_nb.checkpoint.verify import damage, in_parallel
from air_nb.errors import CheckpointDamagedError, CheckpointNotFoundError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.futures import Future

__all__ = ["VolumeReader"]

_GAP_BYTES = 2**20  # two ranges that lie closer than this are fetched as one


class VolumeReader(FileSystemReader):
    """Storage reader for ``dcp.load``, from any directory or URL, of our checkpoints and torch's own.

    Where there is a manifest, each rank checks every file that it is going to read, and DCP makes the ranks agree,
    before any tensor changes. Files behind a network or FUSE come by way of this machine's disk, once for all ranks
    there.

    Args:
        path: Directory or URL of the checkpoint; ``checkpoint_id`` of the load replaces it.
        verify: Compare the digests of whole files. Without it, only the ranges that are needed are fetched.
        **options: Further options of torch's FileSystemReader.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True, **options: Any) -> None:
        super().__init__(path, **options)
        self._store = open_store(path)
        self._verify = verify
        self._records: Mapping[str, FileRecord] = {}
        self._key = ""
        self._stage: Stage | None = None
        self._ready: set[tuple[str, int, int]] = set()

    @property
    def checkpoint_id(self) -> str:
        """Directory or URL of the checkpoint."""
        return self._store.url

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by DCP on every rank, if the load names a checkpoint."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._store = open_store(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Called by DCP on every rank, first.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            CheckpointDamagedError: The manifest or ``.metadata`` is not what was committed.
            CheckpointMismatchError: A newer air_nb wrote it.
            OSError: The storage can't be read.
        """
        del args
        rank = kwargs.get("rank")
        name = METADATA_FILE if rank is None else f"__{rank}{METADATA_FILE}"
        manifest = read_manifest(self._store)
        self._records = manifest.files if manifest else {}
        self._close_stage()
        try:
            content = self._store.read(name)
        except FileNotFoundError as error:
            msg = f"no checkpoint in {self._store}: it has no {name}; list_checkpoints(root) tells what is there"
            raise CheckpointNotFoundError(msg) from error
        expected = self._records.get(name)
        if self._verify and expected and record_of(content, expected.algorithm) != expected:
            msg = (
                f"{self._store}: {name} ({len(content)} bytes) is not what was committed; restore an earlier checkpoint"
            )
            raise CheckpointDamagedError(msg)
        self._key = hashlib.sha256(self._store.url.encode() + content).hexdigest()[:32]
        metadata = load_metadata(content)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Called by DCP on every rank, before the ranks agree to read: check and fetch what this rank needs.

        Raises:
            CheckpointDamagedError: Files are missing or are not what was committed.
            OSError: The storage can't be read.
        """
        try:
            self._make_ready(plan)
        except BaseException:
            self._close_stage()
            raise
        return super().prepare_local_plan(plan)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Called by DCP on every rank: copy into the tensors.

        Raises:
            CheckpointDamagedError: Files are missing or are not what was committed.
            OSError: The storage can't be read.
        """
        try:
            self._make_ready(plan)  # again, for what a planner of the user's has added to the agreed plan
            self.fs = FileSystem()
            self.path = self._stage.path if self._stage else cast("Path", self._store.path)
            return super().read_data(plan, planner)
        finally:
            self._close_stage()

    def _close_stage(self) -> None:
        if self._stage is not None:
            self._stage.close()
        self._stage, self._ready = None, set()

    def _make_ready(self, plan: LoadPlan) -> None:
        infos = (self.storage_data[item.storage_index] for item in plan.items)
        missing = {(info.relative_path, info.offset, info.length) for info in infos} - self._ready
        if not missing:
            return
        wanted: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for name, offset, length in missing:
            wanted[name].append((offset, length))
        whole = self._verify and wanted.keys() <= self._records.keys()
        if not self._store.is_remote:
            problems = in_parallel(self._check_in_place, wanted) if whole else ()
        elif whole:
            self._stage = self._stage or Stage(f"read-{self._key}")
            problems = in_parallel(self._fetch, wanted)
        else:
            self._stage = self._stage or Stage()
            problems = in_parallel(self._fetch_ranges, wanted.items())
        if problems:
            msg = f"{self._store}: {'; '.join(problems)}. Nothing was loaded; restore an earlier checkpoint"
            raise CheckpointDamagedError(msg)
        self._ready |= missing

    def _check_in_place(self, name: str) -> str | None:
        return damage(self._store, name, self._records[name])

    def _fetch(self, name: str) -> str | None:
        """Fetch a whole file, unless another rank of this machine has, and say what is wrong with it."""
        assert self._stage is not None
        target = self._stage.path / name
        with self._stage.exclusively(name):
            if target.exists():
                return None
            part = target.with_name(f"{name}.part")
            with part.open("wb") as file:
                problem = damage(self._store, name, self._records[name], file.write)
            if problem is None:
                part.rename(target)
            return problem

    def _fetch_ranges(self, item: tuple[str, list[tuple[int, int]]]) -> str | None:
        """Fetch parts of a file, each to its own place in a file that is otherwise a hole."""
        assert self._stage is not None
        name, ranges = item
        try:
            target = self._stage.path / name
            with target.open("r+b" if target.exists() else "wb") as file:
                for start, end in _merged(ranges):
                    for at in range(start, end, BLOCK_BYTES):
                        file.seek(at)
                        file.write(self._store.read_range(name, at, min(BLOCK_BYTES, end - at)))
        except FileNotFoundError:
            return f"{name} is missing"
        return None


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Make few (start, end) of many (offset, length)."""
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if merged and offset - merged[-1][1] < _GAP_BYTES:
            merged[-1] = (merged[-1][0], max(merged[-1][1], offset + length))
        else:
            merged.append((offset, offset + length))
    return merged
