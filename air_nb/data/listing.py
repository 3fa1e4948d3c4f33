"""Lists a dataset once for all ranks: the first that asks does it, and the others get its manifest or its error.

Not a collective: a rank that asks alone (``if rank == 0: print(len(dataset))``) waits for nobody. What is shared goes
through the store of the process group, as JSON.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from air_nb.data.files import list_files
from air_nb.data.manifest import Manifest
from air_nb.errors import DataError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["list_for_all_ranks", "rank_and_world_size"]

_CHUNK_BYTES = 4 * 2**20  # the store refuses values above 8 MiB
_POLL_S = 0.02
_TIMEOUT_S = 1800.0  # as torch's own collectives
_ERROR_GRACE_S = 5.0  # in which the other ranks ask for the listing too, or not at all

# How often this process has listed the same files. All ranks run the same program, so that equal numbers mean the same
# listing; if they do not, a rank gets one of the same files from a little earlier.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def list_for_all_ranks(root: str, pattern: str, storage_options: Mapping[str, Any]) -> Manifest:
    """The manifest of a dataset, listed by one rank if there is a process group, else by this process.

    Args:
        root: A directory or URL.
        pattern: Of the files.
        storage_options: What fsspec's file system takes.

    Raises:
        DataError: It can't be listed, by whichever rank tried; or that rank did not answer for 30 minutes.
        ValueError: The pattern is malformed.
    """

    def list_here() -> Manifest:
        return list_files(root, pattern, storage_options=storage_options)

    store = _store()
    if store is None:
        return list_here()
    name = hashlib.sha256(repr((root, pattern, sorted(storage_options))).encode()).hexdigest()[:16]
    key = f"air_nb/listing/{name}/{next(_numbers[name])}"
    if store.add(f"{key}/asked", 1) == 1:
        return _list_and_share(store, key, list_here)
    return _receive(store, key, root)


def rank_and_world_size() -> tuple[int, int]:
    """This rank and the number of ranks by the process group; (0, 1) without one."""
    distributed = sys.modules.get("torch.distributed")  # not imported: then there is none
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _store() -> Store | None:
    """The store that the ranks share; None if this is the only one, or a loader worker with its parent's connection."""
    if rank_and_world_size()[1] == 1:
        return None
    from torch.distributed.distributed_c10d import _get_default_store
    from torch.utils.data import get_worker_info

    return _get_default_store() if get_worker_info() is None else None


def _list_and_share(store: Store, key: str, list_here: Callable[[], Manifest]) -> Manifest:
    try:
        manifest = list_here()
    except BaseException as error:
        _send(store, key, {"error": f"{error}" if isinstance(error, DataError) else repr(error)})
        _await_receivers(store, key)
        raise
    _send(store, key, {name: getattr(manifest, name) for name in manifest.__slots__})
    return manifest


def _await_receivers(store: Store, key: str) -> None:
    """Wait until the others have the error too: this rank is about to end, and may be the one that hosts the store."""
    deadline = time.monotonic() + _ERROR_GRACE_S
    while store.add(f"{key}/received", 0) < rank_and_world_size()[1] - 1 and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _send(store: Store, key: str, message: Mapping[str, Any]) -> None:
    data = zlib.compress(json.dumps(message).encode(), level=1)
    starts = range(0, len(data), _CHUNK_BYTES)
    for number, start in enumerate(starts):
        store.set(f"{key}/{number}", data[start : start + _CHUNK_BYTES])  # type: ignore[arg-type]  # bytes work too
    store.set(f"{key}/chunks", str(len(starts)))


def _receive(store: Store, key: str, root: str) -> Manifest:
    deadline = time.monotonic() + _TIMEOUT_S
    while not store.check([f"{key}/chunks"]):
        if time.monotonic() > deadline:
            msg = f"the rank that lists {root} has not answered for {_TIMEOUT_S:.0f} s: see what it does"
            raise DataError(msg)
        time.sleep(_POLL_S)
    data = b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(f"{key}/chunks"))))
    message = json.loads(zlib.decompress(data))
    if "error" in message:
        store.add(f"{key}/received", 1)
        raise DataError(message["error"])
    for name in ("paths", "sizes_bytes", "versions"):
        message[name] = tuple(message[name])
    return Manifest(**message)
