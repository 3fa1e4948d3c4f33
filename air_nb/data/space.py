"""How much a cache may hold, and what goes when that is not enough. One ledger for all processes of the node.

::

    <cache>/                     its lock: whoever changes the ledger, evicts, sweeps, or makes a directory of leases
        ledger                   see ledger.py; bytes of the objects and of downloads are exact again after each scan
        objects/<aa>/<key>       the files, read-only; accessed = last used; more links than names = in use
        paths/<root>/<path>      the same files as they lie below their root: what users get; see names.py
        paths/<key>/<path>       those whose name there is another one's: an older version's, mostly
        incoming/<key>.<bytes>   downloads: space is theirs before the first byte
        locks/<key>              held while its file is downloaded
        leases/<process>/<n>     see leases.py
        leases/<process>/reading see announcement.py: the files that it names are in use too

Whatever a process was doing when it was killed, the ledger says rather too much than too little, and the kernel has
given up its locks: so the next scan finds what is nobody's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from air_nb.data.leases import LEASES, being_read, sweep_leases
from air_nb.data.ledger import Ledger
from air_nb.data.locks import lock_directory, try_lock, unlock_and_close, wait_for_lock
from air_nb.data.names import Names
from air_nb.errors import DataError

__all__ = ["Limits", "Space"]

_log = logging.getLogger(__name__)

_OWN_LINKS = 2  # in objects/ and in paths/
_SLACK = 0.05  # evicted beyond the need, so that not every download has to look at all files
_LOCK_TIMEOUT_S = 600.0
_FIRST_POLL_S = 0.02
_LONGEST_POLL_S = 1.0
_TELL_AFTER_S = 3.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UNSYNCED_S = 300.0  # dirty pages are written back within 30 s, ten times that if the disk is slow


@dataclass(frozen=True, slots=True)
class Limits:
    """What a cache may use.

    Attributes:
        max_bytes: Cap of all files together; None for no cap.
        min_free_bytes: What must stay free on the disk; None for 10 % of it.
        patience_s: How long a download waits for room while all files are in use.
    """

    max_bytes: int | None = None
    min_free_bytes: int | None = None
    patience_s: float = 300.0


@dataclass(frozen=True, slots=True)
class _Stored:
    used_at_ns: int
    size_bytes: int
    links: int
    inode: int
    key: str


@dataclass(frozen=True, slots=True)
class _Room:
    """The state of the cache and its disk at one moment, in bytes; those in use are only known after a scan."""

    stored: int
    incoming: int
    max_bytes: int | None
    free: int
    min_free: int
    in_use: int = 0

    def missing(self, size_bytes: int) -> int:
        """How much has to go before so many bytes may come in; none if not positive."""
        beyond_cap = self.stored + self.incoming + size_bytes - self.max_bytes if self.max_bytes is not None else 0
        # What is promised to downloads counts as not yet written: it may be.
        below_floor = self.min_free + self.incoming + size_bytes - self.free
        return max(beyond_cap, below_floor)

    def may_come(self, size_bytes: int) -> bool:
        """Whether it is worth waiting for: files that others use or download now may go later."""
        fits = self.max_bytes is None or size_bytes <= self.max_bytes
        return fits and (self.in_use > 0 or self.incoming > 0)


class Space:
    """The ledger, the eviction and the sweep of one cache directory. Holds no state of its own.

    Args:
        directory: The cache, a private directory on a disk of this node.
        limits: What it may use.

    Attributes:
        names: Of its files.
    """

    def __init__(self, directory: str, limits: Limits) -> None:
        self.directory = directory
        self.limits = limits
        self._ledger = Ledger(directory)
        self.names = Names(directory, self._ledger)

    def open(self) -> None:
        """Make what is not there yet, and delete what killed processes left."""
        for name in ("objects", "paths", "incoming", "locks", LEASES):
            Path(self.directory, name).mkdir(mode=0o700, exist_ok=True)
        with self._lock():
            sweep_leases(self.directory)
            if self._is_first_since_boot():
                self._discard_unsynced()
                Path(self.directory, "boot").write_text(_BOOT_ID.read_text())
            if self._sweep_incoming() or not self._ledger.path.exists():
                self._scan()

    def hold(self, path: str) -> int | None:
        """Keep a file from being evicted until the returned descriptor is unlocked and closed.

        Returns:
            None if it is not there.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            if not try_lock(descriptor, shared=True):
                wait_for_lock(descriptor, path, shared=True, timeout_s=_LOCK_TIMEOUT_S)
            if os.fstat(descriptor).st_nlink >= _OWN_LINKS:  # not evicted before it was locked
                return descriptor
        except BaseException:
            unlock_and_close(descriptor)
            raise
        unlock_and_close(descriptor)
        return None

    # -- space for a download ----------------------------------------------------------------------------------------

    def reserve(self, key: str, size_bytes: int, url: str) -> tuple[Path, int]:
        """Make room for a file that is about to be downloaded, by evicting what was not used for longest.

        Returns:
            An empty file to download to, for ``publish`` or ``cancel``, and the number of evicted files.

        Raises:
            DataError: It is larger than the cache may be, or all that could go is in use or not ours.
        """
        target = Path(self.directory, "incoming", f"{key}.{size_bytes}")
        started_at = time.monotonic()
        evicted = 0
        for poll_s in _polls_s():
            with self._lock():
                room = self._room(*self._read())
                if room.missing(size_bytes) > 0:
                    room, gone = self._make_room(size_bytes)
                    evicted += gone
                if room.missing(size_bytes) <= 0:
                    # In this order: killed in between, the ledger says too much, until the next scan.
                    self._ledger.set_sizes(room.stored, room.incoming + size_bytes)
                    target.touch(mode=0o600)
                    return target, evicted
            waited_s = time.monotonic() - started_at
            if not room.may_come(size_bytes) or waited_s > self.limits.patience_s:
                raise DataError(self._refusal(url, size_bytes, room))
            if poll_s == _LONGEST_POLL_S and waited_s < _TELL_AFTER_S:
                _log.warning("waiting until files are released: %s", self._refusal(url, size_bytes, room))
            time.sleep(poll_s)
        raise AssertionError(key)  # the polls never end

    def publish(self, key: str, size_bytes: int, target: Path, names: Sequence[str], link: str) -> str:
        """Make a complete download an object, name it, and lease it, before anybody can evict it.

        Args:
            key: Of the object.
            size_bytes: What was reserved.
            target: What ``reserve`` returned.
            names: Those that it may have.
            link: The link that is the lease.

        Returns:
            The name that it has.
        """
        with self._lock():
            target.rename(self.names.object_path(key))
            stored, incoming = self._read()
            self._ledger.set_sizes(stored + size_bytes, incoming - size_bytes)
            return self._lease(key, names, link)

    def adopt(self, key: str, size_bytes: int, names: Sequence[str], link: str) -> str | None:
        """Name and lease an object that lacks its name: who published it was killed in between.

        Args:
            key: Of the object.
            size_bytes: What it should be.
            names: Those that it may have.
            link: The link that is the lease.

        Returns:
            The name that it has; None if it is not there, or not what it should be.
        """
        with self._lock():  # an object without a name may also be one that is being evicted
            kept = Path(self.names.object_path(key))
            if not kept.exists() or kept.stat().st_size != size_bytes:
                return None
            return self._lease(key, names, link)

    def cancel(self, target: Path, size_bytes: int) -> None:
        """Give up a download."""
        with self._lock():
            if target.exists():
                target.unlink()
                stored, incoming = self._read()
                self._ledger.set_sizes(stored, incoming - size_bytes)

    def evict(self, size_bytes: int) -> int:
        """Delete unused files of at least so many bytes, for a disk that is full before the ledger thinks so.

        Returns:
            How many were deleted; 0 if none can.
        """
        started_at = time.monotonic()
        for poll_s in _polls_s():
            with self._lock():
                sweep_leases(self.directory)
                evicted, busy_bytes = self._evict(size_bytes, self._scan())
            if evicted or not busy_bytes or time.monotonic() - started_at > self.limits.patience_s:
                return evicted
            time.sleep(poll_s)
        raise AssertionError(size_bytes)  # the polls never end

    def discard(self, key: str, names: Sequence[str]) -> None:
        """Delete one object, whoever uses it: it is not what it should be. The caller holds the lock of its key.

        Args:
            key: Of the object.
            names: Those that it may have.
        """
        with self._lock():
            file = Path(self.names.object_path(key))
            if not file.exists():
                return
            size_bytes = file.stat().st_size
            self._ledger.count_eviction()
            self.names.delete(key, self.names.of(key, names))
            stored_bytes, incoming_bytes = self._read()
            self._ledger.set_sizes(max(0, stored_bytes - size_bytes), incoming_bytes)

    def _refusal(self, url: str, size_bytes: int, room: _Room) -> str:
        what = f"{url} ({size_bytes:,} bytes) does not fit into the cache {self.directory}"
        if room.max_bytes is not None and size_bytes > room.max_bytes:
            return f"{what}, which may hold {room.max_bytes:,} bytes: raise AIR_NB_CACHE_MAX_BYTES"
        used = f"{room.stored:,} bytes are cached, {room.in_use:,} of them in use, {room.incoming:,} being downloaded"
        if room.max_bytes is not None and room.stored + room.incoming + size_bytes > room.max_bytes:
            return (
                f"{what}: {used}, {room.max_bytes:,} allowed. Raise AIR_NB_CACHE_MAX_BYTES, or lower batch_size, "
                "prefetch_factor or num_workers"
            )
        return (
            f"{what}: its disk has {room.free:,} bytes free and {room.min_free:,} of them must stay so; {used}. "
            "Free some, set AIR_NB_CACHE_DIR to another disk, or lower AIR_NB_CACHE_MIN_FREE_BYTES"
        )

    # -- the rest is called with the lock held -----------------------------------------------------------------------

    def _lock(self) -> contextlib.AbstractContextManager[None]:
        return lock_directory(self.directory, timeout_s=_LOCK_TIMEOUT_S)

    def _lease(self, key: str, names: Sequence[str], link: str) -> str:
        """Name an object, and lease it."""
        name = self.names.give(key, names)
        os.link(self.names.object_path(key), link)
        return name

    def _read(self) -> tuple[int, int]:
        sizes = self._ledger.sizes()
        if sizes is None:
            self._scan()
            return self._read()
        return sizes

    def _room(self, stored: int, incoming: int) -> _Room:
        disk = os.statvfs(self.directory)
        min_free = self.limits.min_free_bytes
        if min_free is None:
            min_free = disk.f_blocks * disk.f_frsize // 10
        return _Room(stored, incoming, self.limits.max_bytes, disk.f_bavail * disk.f_frsize, min_free)

    def _make_room(self, size_bytes: int) -> tuple[_Room, int]:
        """Sweep and evict; returns the room then, and the number of evicted files."""
        sweep_leases(self.directory)
        self._sweep_incoming()
        files = self._scan()
        room = self._room(*self._read())
        missing = room.missing(size_bytes)
        too_large = room.max_bytes is not None and size_bytes > room.max_bytes
        evicted, busy_bytes = (0, 0) if missing <= 0 or too_large else self._evict(missing, files)
        in_use = sum(file.size_bytes for file in files if file.links > _OWN_LINKS)
        return replace(self._room(*self._read()), in_use=in_use + busy_bytes), evicted

    def _evict(self, size_bytes: int, files: list[_Stored]) -> tuple[int, int]:
        """Evict files of so many bytes, and of a little more if that takes no file too many. Dead leases are swept.

        Returns:
            Number of evicted files, and bytes of those that could go but for somebody who reads them now.
        """
        count = busy_bytes = 0
        self._ledger.count_eviction()
        reading = being_read(self.directory)
        names = self.names.all()
        stored, incoming = self._read()
        spare = int(_SLACK * stored)
        for file in sorted(files, key=lambda file: file.used_at_ns):
            if size_bytes <= 0 and size_bytes + spare < file.size_bytes:
                break
            own = names.get(file.inode, ())
            if file.links > 1 + len(own):
                continue
            if file.key in reading or not self._delete_unused(file.key, own):
                busy_bytes += file.size_bytes
                continue
            size_bytes -= file.size_bytes
            stored -= file.size_bytes
            count += 1
        self._ledger.set_sizes(stored, incoming)
        if busy_bytes and size_bytes > 0:
            self._ledger.ask_for_room(2 * _LONGEST_POLL_S)
        return count, busy_bytes

    def _delete_unused(self, key: str, names: Sequence[str]) -> bool:
        """Delete an object unless somebody leases it: not waited for, it may be this very thread."""
        descriptor = os.open(self.names.object_path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not try_lock(descriptor) or os.fstat(descriptor).st_nlink > 1 + len(names):
                return False
            self.names.delete(key, names)
            return True
        finally:
            unlock_and_close(descriptor)

    def _scan(self) -> list[_Stored]:
        """Look at all there is, and write the ledger anew."""
        files = list(self._stored())
        incoming = sum(int(path.suffix[1:]) for path in Path(self.directory, "incoming").iterdir())
        self._ledger.set_sizes(sum(file.size_bytes for file in files), incoming)
        return files

    def _stored(self) -> Iterator[_Stored]:
        for stripe in os.scandir(f"{self.directory}/objects"):
            for entry in os.scandir(stripe.path):
                status = entry.stat()
                yield _Stored(status.st_atime_ns, status.st_size, status.st_nlink, status.st_ino, entry.name)

    def _sweep_incoming(self) -> int:
        """Delete the downloads and locks of processes that have died; returns how many."""
        swept = 0
        downloads = {path.stem: path for path in Path(self.directory, "incoming").iterdir()}
        for key in downloads.keys() | {path.name for path in Path(self.directory, "locks").iterdir()}:
            lock = f"{self.directory}/locks/{key}"
            descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if try_lock(descriptor):
                    if key in downloads:
                        downloads[key].unlink(missing_ok=True)
                    Path(lock).unlink(missing_ok=True)
                    swept += 1
            finally:
                unlock_and_close(descriptor)
        return swept

    def _is_first_since_boot(self) -> bool:
        marker = Path(self.directory, "boot")
        return not marker.exists() or marker.read_text() != _BOOT_ID.read_text()

    def _discard_unsynced(self) -> None:
        """Delete what was downloaded last before the machine went down: downloads are not synced to the disk.

        After a power cut such a file may have its right size and be full of zeros.
        """
        fetched_at = {file: Path(self.names.object_path(file.key)).stat().st_mtime for file in self._stored()}
        last = max(fetched_at.values(), default=0.0)
        names = self.names.all()
        for file, at in fetched_at.items():
            if at > last - _UNSYNCED_S:
                self.names.delete(file.key, names.get(file.inode, ()))
        if fetched_at:
            self._scan()


def _polls_s() -> Iterator[float]:
    return (min(_FIRST_POLL_S * 2**number, _LONGEST_POLL_S) for number in itertools.count())
