"""Datasets of files: each item is a local path, or what ``decode`` makes of it.

Under ``air_nb.data.DataLoader`` they are read in batches; a plain torch DataLoader and a ``for`` loop work as well.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from air_nb.data.cache import Cache, CacheMetrics, Place
from air_nb.data.files import is_behind_network, resolve_root
from air_nb.data.leases import Lease, LeasedPath
from air_nb.data.listing import list_for_all_ranks, rank_and_world_size
from air_nb.data.manifest import Manifest
from air_nb.data.order import Order
from air_nb.data.progress import FetchProgress
from air_nb.errors import DataError

__all__ = ["FileDataset", "Files", "UCVolumeDataset"]

_REMEMBERED = 2**16  # places of the first files in the cache: 35 MB at most, for 2 us of each hit


class Files:
    """Files through the cache: what both datasets share."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        pattern: str,
        *,
        decode: Callable[[str], Any] | None,
        cache: Cache | None,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self.root = resolve_root(root)
        self.pattern = pattern
        self.decode = decode
        self.cache = cache if cache is not None else Cache() if is_behind_network(self.root) else None
        self._storage_options = dict(storage_options or {})
        self._manifest: Manifest | None = None
        self._progress: FetchProgress | None = None
        self._shown_misses = 0
        self._places: list[Place | None] = []  # not a dict: finding an entry takes three more misses of the processor
        # A rank that has no process group yet waits for it, so that one rank can list for all. Others list now: errors
        # appear where the mistake is, and forked loader workers find the manifest made.
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or rank_and_world_size()[1] > 1:
            self.manifest  # noqa: B018 - for its effect

    @property
    def manifest(self) -> Manifest:
        """The files, listed once, by one rank for all.

        Raises:
            DataError: They can't be listed, or there are none.
        """
        if self._manifest is None:
            self._manifest = list_for_all_ranks(self.root, self.pattern, self._storage_options)
        return self._manifest

    def __len__(self) -> int:
        return len(self.manifest)

    def __getstate__(self) -> dict[str, Any]:
        self.manifest  # noqa: B018 - so that not every loader worker lists
        return self.__dict__ | {"_progress": None, "_places": []}

    @property
    def is_plain(self) -> bool:
        """Whether an item is what this class makes of it: a subclass may have a ``__getitem__`` of its own."""
        kind = type(self)
        return kind is FileDataset or all(
            getattr(kind, name, None) in {getattr(FileDataset, name), getattr(Dataset, name, None)}
            for name in ("__getitem__", "__getitems__")
        )

    def leased(self, index: int) -> tuple[Any, Lease | None]:
        """One item, and the lease of its file if the item is a path of the cache: release it when the batch is done.

        Raises:
            IndexError: There is no such item.
            DataError: The file can't be fetched, or ``decode`` failed; the message names it.
        """
        if self.decode is None and self.cache is not None:
            lease = self._lease(index)
            return lease.path, lease
        rows, error = self.decoded((index,))
        if error is not None:
            raise error
        return rows[0], None

    def decoded(self, indices: Sequence[int]) -> tuple[list[Any], Exception | None]:
        """Items, read together, none of which is a path of the cache.

        Returns:
            Those before the first one that can't be read, and what `leased` raises for that one.
        """
        rows: list[Any] = []
        try:
            if self.cache is None:
                self._decode_local(indices, rows)
            else:
                self._decode_cached(self.cache, indices, rows)
        except Exception as error:  # noqa: BLE001 - of the user's function, of the storage, of the disk: the caller's to raise
            return rows, error
        return rows, None

    def _decode_local(self, indices: Sequence[int], rows: list[Any]) -> None:
        decode, paths = self.decode, self.manifest.urls(indices)
        if decode is None:
            rows += paths
            return
        try:
            for path in paths:
                rows.append(decode(path))
        except Exception as error:  # the user's function
            raise self._undecodable(indices[len(rows)], paths[len(rows)], error) from error

    def _decode_cached(self, cache: Cache, indices: Sequence[int], rows: list[Any]) -> None:
        decode, known = self.decode, self._places
        assert decode is not None
        n_known = len(known)
        places = [(known[index] if -1 < index < n_known else None) or self._place(cache, index) for index in indices]
        reading = cache.reading(places)
        try:
            with reading:
                while len(rows) < len(places):
                    try:
                        for path in reading.paths(len(rows)):
                            rows.append(decode(path))  # noqa: PERF401 - as above
                    except Exception as error:  # the user's function
                        place = places[len(rows)]
                        if reading.check(place):
                            raise self._undecodable(indices[len(rows)], place.path, error) from error
                    if len(rows) < len(places):
                        rows.append(self._fetched(indices[len(rows)]))
        finally:
            reading.__exit__()  # an interrupt may have struck in the first one

    def _fetched(self, index: int) -> Any:
        """An example of a file that is not in the cache, or not sure to stay there."""
        assert self.decode is not None
        lease = self._lease(index)
        try:
            return self.decode(lease.path)
        except Exception as error:  # the user's function
            raise self._undecodable(index, lease.path, error) from error
        finally:
            lease.release()

    def _lease(self, index: int) -> Lease:
        assert self.cache is not None
        lease = self.cache.lease(self.manifest[index], storage_options=self._storage_options)
        self._show_downloads()
        return lease

    def _undecodable(self, index: int, path: str, error: Exception) -> DataError:
        """Name the file, which must not get lost."""
        url = self.manifest[index].url
        return DataError(f"decoding {url} (item {index}, read from {path}) failed: {type(error).__name__}: {error}")

    def _place(self, cache: Cache, index: int) -> Place:
        place = cache.place(self.manifest[index])
        if not self._places:
            self._places = [None] * min(len(self), _REMEMBERED)
        if -1 < index < len(self._places):
            self._places[index] = place
        return place

    def _show_downloads(self) -> None:
        """Tell how far they are, in the main process: those of loader workers are told by their parent."""
        if self.cache is not None and self.cache.misses != self._shown_misses and get_worker_info() is None:
            self._shown_misses = self.cache.misses
            self.show_progress(self.cache.metrics())

    def metrics(self) -> CacheMetrics:
        """What the cache did for this dataset in this process."""
        return self.cache.metrics() if self.cache is not None else CacheMetrics()

    def show_progress(self, metrics: CacheMetrics) -> None:
        """Tell on stderr how far the downloads are, now and then.

        Args:
            metrics: What was done so far, by this rank with all its loader workers.
        """
        if self._progress is None:
            self._progress = FetchProgress(self.root, len(self.manifest))
        self._progress.show(metrics)

    def _item(self, index: int) -> Any:
        value, lease = self.leased(operator.index(index))
        return value if lease is None else LeasedPath(value, lease)


class FileDataset(Files, Dataset[Any]):
    """The files below a directory or URL, as local paths or as what ``decode`` makes of them.

    Files behind a network (URLs, network and FUSE mounts) are copied to the node's cache when they are first needed;
    other paths are the files' own. A cached path is valid as long as the string that was yielded exists.

    Args:
        path_or_url: A directory, or any URL that fsspec knows.
        pattern: Which files, by names below it: ``*.jpg``, ``**/*.jpg``, ``train/**``; by default all, at any depth.
        decode: Makes an example of a path; None for the path itself.
        shuffle: Whether ``air_nb.data.DataLoader`` and ``for`` loops visit them in an order drawn anew each epoch.
        seed: Of that order.
        cache: Another cache than the node's; local files too then go through it.
        storage_options: What fsspec's file system takes: credentials, an endpoint.

    Raises:
        DataError: They can't be listed, or there are none. In a rank without a process group: on first use.
        ValueError: The pattern is malformed.
    """

    def __init__(
        self,
        path_or_url: str | os.PathLike[str],
        pattern: str = "**",
        *,
        decode: Callable[[str], Any] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        cache: Cache | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.shuffle = shuffle
        self.seed = seed
        self._epoch = 0
        super().__init__(path_or_url, pattern, decode=decode, cache=cache, storage_options=storage_options)

    def __getitem__(self, index: int) -> Any:
        return self._item(index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Items, read together: what torch's DataLoader asks for."""
        if self.decode is None or not self.is_plain:
            return [self[index] for index in indices]
        rows, error = self.decoded([operator.index(index) for index in indices])
        if error is not None:
            raise error
        return rows

    def __iter__(self) -> Iterator[Any]:
        """All items, in the order of the next epoch; not split over ranks."""
        order = Order(items=len(self), seed=self.seed, epoch=self._epoch, shuffle=self.shuffle)
        self._epoch += 1
        return map(self._item, order.items_at(np.arange(len(self), dtype=np.int64)).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next ``for`` loop has."""
        self._epoch = epoch


class UCVolumeDataset(Files, IterableDataset[str]):
    """The files of one directory of a volume, sorted, as local paths: as it is documented for AI Runtime.

    Where the machine has no ``/Volumes``, ``AIR_NB_VOLUMES`` is the directory or URL that stands for it. Under a plain
    torch DataLoader, or in a ``for`` loop, the files are split over the ranks of the process group and the loader
    workers of each: file i goes to slot i modulo ranks x workers, so all ranks need the same ``num_workers``.
    ``air_nb.data.DataLoader`` splits by position instead, and has no such condition.

    Args:
        path: The directory.
        cache: Another cache than the node's; local files too then go through it.
        storage_options: What fsspec's file system takes, where ``AIR_NB_VOLUMES`` is a URL.

    Raises:
        DataError: They can't be listed, or there are none. In a rank without a process group: on first use.
    """

    shuffle = False
    seed = 0

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cache: Cache | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._yielded = self._skip = 0
        self._rank_and_world_size: tuple[int, int] | None = None
        super().__init__(path, "*", decode=None, cache=cache, storage_options=storage_options)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned loader worker has no process group to ask.
        return super().__getstate__() | {"_rank_and_world_size": rank_and_world_size()}

    def __iter__(self) -> Iterator[str]:
        slot, slots = self._slot()
        start, self._skip = self._skip, 0
        self._yielded = start
        for index in range(slot + start * slots, len(self), slots):
            self._yielded += 1
            yield self._item(index)

    def _slot(self) -> tuple[int, int]:
        worker = get_worker_info()
        rank, world_size = rank_and_world_size()
        if world_size == 1 and worker is not None and self._rank_and_world_size is not None:
            rank, world_size = self._rank_and_world_size
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return rank * workers + number, world_size * workers

    def state_dict(self) -> dict[str, Any]:
        """How many files this process has yielded in this iteration, for a loop without loader workers."""
        return {"yielded": self._yielded, "slot": list(self._slot()), "manifest": self.manifest.hash}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on behind the files that were yielded.

        Raises:
            DataError: The state is of other files, or of another rank or number of ranks and workers:
                ``air_nb.data.DataLoader`` has no such condition.
        """
        if state["manifest"] != self.manifest.hash or tuple(state["slot"]) != self._slot():
            msg = (
                f"the state of {self.root} is of other files, or of slot {state['slot']} and not {list(self._slot())}; "
                "keep the state of air_nb.data.DataLoader instead: it fits any number of ranks and workers"
            )
            raise DataError(msg)
        self._skip = self._yielded = int(state["yielded"])
