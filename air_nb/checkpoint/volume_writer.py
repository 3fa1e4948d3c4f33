"""``VolumeWriter``: torch's FileSystemWriter that fails when it should, hashes what it writes, and commits.

What torch's own lets pass is noticed here: an error in any writer thread fails the save on all ranks; every file is
hashed while it is written; ``.metadata`` comes after all shards, then a manifest and COMMIT. Targets behind a network
or FUSE are written by way of this machine's disk, in parallel, retried, their sizes checked.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from air_nb.checkpoint.commit import publish, step_by_name, unpublish
from air_nb.checkpoint.manifest import COMMIT_FILE, METADATA_FILE, Digest, FileRecord, Manifest, record_of, versions
from air_nb.checkpoint.stage import Stage
from air_nb.checkpoint.store import Store, open_store
from air_nb.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

__all__ = ["VolumeWriter"]

_SHARD = re.compile(r"__\d+_\d+\.distcp")
_REMOTE_THREADS = 4  # as many uploads at a time


class _Results(list[WriteResult]):
    """What one rank wrote, with the records of its files: DCP carries this to the coordinator."""

    def __init__(self, results: Iterable[WriteResult], files: Mapping[str, FileRecord]) -> None:
        super().__init__(results)
        self.files = dict(files)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Results, (list(self), self.files)


class VolumeWriter(FileSystemWriter):
    """Storage writer for ``dcp.save`` and ``dcp.async_save``, to any directory or URL.

    Args:
        path: Directory or URL of this one checkpoint; ``checkpoint_id`` of the save replaces it.
        single_file_per_rank: As in torch's FileSystemWriter; with ``thread_count`` n it is n files for each rank.
        sync_files: Wait until the disk has the bytes. Uploaded files are always waited for.
        thread_count: Threads that write; by default 4 where files are uploaded, else 1.
        per_thread_copy_ahead: Bytes to copy from the GPU ahead of writing.
        cache_staged_state_dict: Keep the host copy of ``async_save`` for the next one.
        overwrite: Replace a checkpoint that is there already. It stops counting as one first, so a crash never leaves
            a mixture; but it is gone. A directory of its own for each checkpoint is better.
        commit: Write the manifest and COMMIT at the end. Without it the caller does (``commit.publish``).
        **options: Further options of torch's FileSystemWriter.

    Attributes:
        files: After a save: the records of this rank's files, on the coordinator also of ``.metadata``.
        all_files: After a save, on the coordinator: the records of the files of all ranks.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,  # noqa: FBT001, FBT002 - torch's own signature
        sync_files: bool = True,  # noqa: FBT001, FBT002 - likewise
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 10_000_000,
        *,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        commit: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            path,
            single_file_per_rank,
            sync_files,
            per_thread_copy_ahead=per_thread_copy_ahead,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
            **options,
        )
        self.files: dict[str, FileRecord] = {}
        self.all_files: dict[str, FileRecord] = {}
        self._threads = thread_count
        self._sync = sync_files
        self._commit = commit
        self._is_coordinator = False
        self._target = _Target()
        self.fs = self._target  # type: ignore[assignment] # torch's own subclasses do so, too
        self.path = self._target.init_path(path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - torch's
        """Called by DCP on every rank, first."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_coordinator = is_coordinator
        self.files, self.all_files = {}, {}
        # What is uploaded need not survive on this machine's disk.
        self.sync_files = self._sync and not self._target.store.is_remote

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Called by DCP on every rank: the coordinator makes room before any rank may write.

        Raises:
            FileExistsError: There is a checkpoint, and ``overwrite`` is False.
            OSError: The storage refused.
        """
        if self._is_coordinator:
            self._make_room()
        return super().prepare_local_plan(plan)

    def _make_room(self) -> None:
        store = self._target.store
        there = store.list()
        if not {COMMIT_FILE, METADATA_FILE} & there.keys():
            return
        if not self.overwrite:
            msg = f"{store} holds a checkpoint already: give each checkpoint a directory of its own, or overwrite=True"
            raise FileExistsError(msg)
        unpublish(store)
        for name in there:
            if _SHARD.fullmatch(name):
                store.delete(name)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Called by DCP on every rank: write its shards.

        Raises:
            CheckpointError: A thread could not write its file.
            Exception: What the planner raised in any thread.
        """
        threads = self._threads or (_REMOTE_THREADS if self._target.store.is_remote else 1)
        self.thread_count = max(1, min(threads, len(plan.items)))  # a thread without items would leave an empty file
        with self._target.writing_shards() as records:
            results = super().write_data(plan, planner).value()
        self.files = dict(records)
        future: Future[list[WriteResult]] = Future()
        future.set_result(_Results(results, records))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called by DCP on the coordinator when all ranks have written: publish.

        Raises:
            CheckpointError: A file of some rank is not there as it was written.
            OSError: The storage refused.
        """
        files = {name: record for result in results for name, record in cast("_Results", result).files.items()}
        # What goes through memory must not make torch sync every disk of the machine instead.
        self.sync_files = False
        with self._target.writing_metadata() as records:
            super().finish(metadata, results)
        self.files |= records
        self.all_files = files | records
        if self._commit and self.use_collectives:
            publish(self._target.store, self._manifest(len(results)))

    def _manifest(self, world_size: int) -> Manifest:
        return Manifest(
            step=step_by_name(self._target.store.url.rstrip("/").rpartition("/")[2]),
            created_at=time.time(),
            world_size=world_size,
            files=self.all_files,
            versions=versions(),
            run_id=os.environ.get("AIR_NB_RUN_ID"),
            run_name=os.environ.get("AIR_NB_RUN_NAME"),
            mlflow_run_id=os.environ.get("MLFLOW_RUN_ID"),
        )


class _Target(FileSystemBase):
    """What torch's writer takes for a file system: hashes shards, uploads them, and keeps errors of any thread.

    Torch loses what is raised in the threads that it starts; here it is caught where it leaves the file, and raised by
    ``writing_shards`` on the thread that waits for all of them.
    """

    def __init__(self) -> None:
        self.store: Store = open_store(".")
        self._directory: Path | None = None
        self._records: dict[str, FileRecord] = {}
        self._errors: list[tuple[str, Exception]] = []
        self._in_memory: dict[str, io.BytesIO] | None = None

    def init_path(self, path: str | os.PathLike[str]) -> str:
        self.store = open_store(path)
        return self.store.url

    @contextmanager
    def writing_shards(self) -> Iterator[dict[str, FileRecord]]:
        """Let files be written, by several threads; yields their records."""
        self._records, self._errors = {}, []
        stage = Stage() if self.store.is_remote else None
        try:
            self._directory = stage.path if stage else self.store.path
            yield self._records
        finally:
            if stage:
                stage.close()
        self._raise_error()

    def _raise_error(self) -> None:
        if not self._errors:
            return
        name, error = self._errors[0]
        if not isinstance(error, OSError):
            raise error
        by_way_of = f" by way of {self._directory} (TMPDIR decides where)" if self.store.is_remote else ""
        msg = (
            f"{name} could not be written to {self.store}{by_way_of}: {error}. The checkpoint was not published; "
            "earlier ones in directories of their own are as they were"
        )
        raise CheckpointError(msg) from error

    @contextmanager
    def writing_metadata(self) -> Iterator[dict[str, FileRecord]]:
        """Let small files be written that appear whole, and only if all went well; yields their records."""
        self._records, self._in_memory = {}, {}
        try:
            yield self._records
            for name, file in self._in_memory.items():
                content = file.getvalue()
                self.store.write(name, content)
                self._records[name] = record_of(content)
        finally:
            self._in_memory = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        name = os.path.basename(path)  # noqa: PTH119 - of a URL, too
        assert mode == "wb", f"a writer opens {name} to write, not {mode}"
        if self._in_memory is not None:
            yield self._in_memory.setdefault(name, _KeptBytesIO())
            return
        try:
            yield from self._shard(name)
        except Exception as error:  # noqa: BLE001 - the border of torch's threads: writing_shards raises it
            self._errors.append((name, error))

    def _shard(self, name: str) -> Iterator[io.IOBase]:
        assert self._directory is not None
        local = self._directory / name
        with local.open("wb") as file:
            hashed = _HashedFile(file, lambda error: self._errors.append((name, error)), lambda: bool(self._errors))
            yield cast("io.IOBase", hashed)
        record = hashed.digest.record()
        if self.store.is_remote:
            self.store.upload(name, local)
            local.unlink()
            if (size_bytes := self.store.size(name)) != record.size_bytes:
                msg = f"{record.size_bytes} bytes were uploaded, {size_bytes} have arrived"
                raise OSError(msg)
        self._records[name] = record

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        assert self._in_memory is not None
        source, target = (os.path.basename(name) for name in (path, new_path))  # noqa: PTH119 - of URLs, too
        self._in_memory[target] = self._in_memory.pop(source)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        del path  # the store's own root
        if self.store.path is not None:
            self.store.path.mkdir(parents=True, exist_ok=True)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether the present save has written it: what was there before it, the coordinator has dealt with."""
        return os.path.basename(path) in (self._in_memory or {})  # noqa: PTH119 - of a URL, too

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        assert self._in_memory is not None
        del self._in_memory[os.path.basename(path)]  # noqa: PTH119 - of a URL, too

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))


class _KeptBytesIO(io.BytesIO):
    """A file in memory whose content is still there after it was closed."""

    def close(self) -> None:
        pass


class _HashedFile:
    """What torch's writer threads see of a shard: written from start to end, hashed on the way.

    Args:
        file: The shard.
        on_error: Told of an error here: ``torch.save`` replaces it with one of its own that only tells a position.
        is_in_vain: Whether another thread has failed, so that the rest need not be written.
    """

    def __init__(self, file: IO[bytes], on_error: Callable[[OSError], object], is_in_vain: Callable[[], bool]) -> None:
        self.digest = Digest()
        self._file = file
        self._on_error = on_error
        self._is_in_vain = is_in_vain
        self.tell, self.flush, self.close, self.fileno = file.tell, file.flush, file.close, file.fileno

    def write(self, data: Any) -> int:
        if self._is_in_vain():
            msg = "not written: another thread has failed"
            raise OSError(msg)
        try:
            size_bytes = self._file.write(data)
        except OSError as error:
            self._on_error(error)
            raise
        self.digest.update(data)
        return size_bytes
