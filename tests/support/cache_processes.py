"""What other processes do to a cache in its tests. Importable: they are started afresh, not forked."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

from air_nb.data.cache import Cache
from air_nb.data.files import list_files
from air_nb.data.leases import Lease
from air_nb.data.locks import lock_directory
from air_nb.data.manifest import Entry
from air_nb.data.space import Limits

__all__ = [
    "content",
    "disk_bytes",
    "fetch_all",
    "hold",
    "open_slowly",
    "read_all",
    "read_and_stand_still",
    "read_at_random",
    "started",
    "use_at_random",
    "use_versions_at_random",
    "version_of",
    "write_files",
]

_CONTEXT = multiprocessing.get_context("spawn")


def content(path: str, size_bytes: int) -> bytes:
    """The bytes that a file of that name has in these tests: the wrong ones would be noticed."""
    block = hashlib.sha256(path.encode()).digest()
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def write_files(directory: Path, n_files: int, size_bytes: int) -> None:
    """Files ``0/0.bin``, ``1/1.bin``, ... in ten directories."""
    for number in range(n_files):
        path = f"{number % 10}/{number}.bin"
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content(path, size_bytes))


def disk_bytes(cache: Path) -> int:
    """What the files of a cache occupy, each counted once: those kept and those being downloaded, at one moment."""
    with lock_directory(str(cache), timeout_s=60.0):  # else one is counted that goes, and one that comes in its place
        paths = [path for name in ("objects", "incoming") for path in (cache / name).rglob("*")]
        return sum(path.stat().st_size for path in paths if path.is_file())


@contextlib.contextmanager
def started(
    n_processes: int, function: Callable[..., None], *args: Any
) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """Processes that run ``function(connection, number, *args)``, and our ends of their pipes. Killed afterwards."""
    running: list[tuple[BaseProcess, Connection]] = []
    try:
        for number in range(n_processes):
            ours, theirs = _CONTEXT.Pipe()
            process: BaseProcess = _CONTEXT.Process(target=function, args=(theirs, number, *args))
            process.start()
            theirs.close()
            running.append((process, ours))
        yield running
    finally:
        for process, connection in running:
            process.kill()
            process.join()
            process.close()
            connection.close()


def fetch_all(connection: Connection, _number: int, cache: Cache, entries: list[Entry]) -> None:
    """Lease and release each file, and say what that took."""
    connection.recv()  # all start together
    for entry in entries:
        lease = cache.lease(entry)
        assert Path(lease.path).read_bytes() == content(entry.path, entry.size_bytes)
        lease.release()
    connection.send(cache.metrics())


def use_at_random(connection: Connection, number: int, cache: Cache, root: str, n_batches: int, rows: int) -> None:
    """Hold batches of files as a loader does, and look whether each is there and right as long as it is held."""
    entries = list(list_files(root))
    chance = Random(number)
    largest = 0
    connection.recv()
    for _ in range(n_batches):
        chosen = chance.sample(entries, rows)
        leases = [cache.lease(entry) for entry in chosen]
        time.sleep(0.002)
        for entry, lease in zip(chosen, leases, strict=True):
            assert Path(lease.path).read_bytes() == content(entry.path, entry.size_bytes), entry
        largest = max(largest, disk_bytes(Path(cache.directory)))
        for lease in leases:
            lease.release()
    connection.send((largest, cache.metrics()))


def version_of(path: str, version: str, size_bytes: int) -> Entry:
    """One of several versions of a file; they have one size."""
    return Entry(f"/versions/{path}", path, size_bytes, version)


def use_versions_at_random(
    connection: Connection, number: int, cache: Cache, paths: list[str], n_rounds: int, size_bytes: int
) -> None:
    """Lease, hold and read versions of files, and look whether each is there with its own content.

    The source is made up: it has all versions at once.
    """
    from air_nb.data import remote

    def download(entry: Entry, target: Path, *_: Any, **__: Any) -> None:
        target.write_bytes(content(entry.path + entry.version, entry.size_bytes))

    remote.download = download
    chance = Random(number)
    held: deque[tuple[Lease, Entry]] = deque(maxlen=2)  # what falls out is released

    def right(entry: Entry, path: str) -> bool:
        return Path(path).read_bytes() == content(entry.path + entry.version, size_bytes)

    connection.recv()
    for _ in range(n_rounds):
        entries = [version_of(chance.choice(paths), str(chance.randrange(3)), size_bytes) for _ in range(6)]
        held.append((cache.lease(entries[0]), entries[0]))
        assert all(right(entry, lease.path) for lease, entry in held)
        with cache.reading([cache.place(entry) for entry in entries]) as reading:
            first = 0
            while first < len(entries):
                for path in reading.paths(first):
                    assert right(entries[first], path)
                    first += 1
                first += 1
    connection.send(cache.metrics())


def read_at_random(connection: Connection, number: int, cache: Cache, root: str, n_batches: int, rows: int) -> None:
    """Decode batches of files as a loader does; each must be there and right from the first to the last moment."""
    from air_nb.data import FileDataset

    def decode(path: str) -> bytes:
        before = Path(path).read_bytes()
        time.sleep(0.001)
        assert Path(path).read_bytes() == before
        return before

    dataset = FileDataset(root, "**/*.bin", decode=decode, cache=cache)
    chance = Random(number)
    largest = 0
    connection.recv()
    for _ in range(n_batches):
        chosen = chance.sample(range(len(dataset)), rows)
        for index, row in zip(chosen, dataset.__getitems__(chosen), strict=True):
            entry = dataset.manifest[index]
            assert row == content(entry.path, entry.size_bytes), entry
        largest = max(largest, disk_bytes(Path(cache.directory)))
    connection.send((largest, cache.metrics()))


def read_all(connection: Connection, _number: int, directory: Path, limits: Limits, root: Path) -> None:
    """Read all files through a cache that this process has not used yet."""
    from air_nb.data import FileDataset

    dataset = FileDataset(root, "**/*.bin", decode=len, cache=Cache(directory, limits=limits))
    connection.send([dataset[index] for index in range(len(dataset))])


def read_and_stand_still(connection: Connection, _number: int, cache: Cache, entries: list[Entry]) -> None:
    """Announce files that are in the cache, and stand still while the first one is read."""
    places = [cache.place(entry) for entry in entries]
    with cache.reading(places) as reading:
        connection.send(next(reading.paths()) == places[0].path)
        os.kill(os.getpid(), signal.SIGSTOP)


def hold(connection: Connection, _number: int, cache: Cache, entry: Entry) -> None:
    """Lease a file, send the lease or keep it, as we are told, and wait to be killed."""
    lease = cache.lease(entry)
    connection.send(lease.path)
    if connection.recv() == "send":
        connection.send(lease)
    connection.recv()


def open_slowly(connection: Connection, _number: int, cache: Cache, entry: Entry) -> None:
    """Begin a download and stand still in the middle of it."""
    from air_nb.data import remote

    def stuck(entry: Entry, target: Path, *_: Any, **__: Any) -> None:
        target.write_bytes(b"half")
        connection.send(str(target))
        os.kill(os.getpid(), signal.SIGSTOP)

    remote.download = stuck
    cache.lease(entry)
