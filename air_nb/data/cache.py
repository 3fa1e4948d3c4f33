"""Copies of remote files on this node's disk, shared by all its ranks and loader workers. Loads no torch.

A file is downloaded once, by whoever needs it first; the others wait for it. What was not used for longest goes when
the cap or the disk's floor is reached, before the next download starts. A file in use never goes: see leases.py.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add, attrgetter, sub
from pathlib import Path
from typing import Any, Self

import platformdirs

from air_nb.data.fetch import Fault, Retries, classify, retrying
from air_nb.data.leases import Lease, Owner
from air_nb.data.locks import lock_file, unlock_and_close
from air_nb.data.manifest import Entry
from air_nb.data.space import Limits, Space
from air_nb.errors import DataError
from air_nb.runs.paths import is_network_path, private_directory

__all__ = ["Cache", "CacheMetrics", "Place", "Reading", "default_directory", "default_limits"]

_NAME_MAX_BYTES = 255
_FULL_DISK_TRIES = 5
_NEEDS_CARE = re.compile(r"(?:^|/)(?:\.{0,2})(?:/|$)")
_TOUCH_AFTER_NS = 10 * 10**9


@dataclass(slots=True)  # not frozen, which would take three times as long: three are made for each batch
class CacheMetrics:
    """What a cache did in this process so far; differences and sums are metrics too.

    Attributes:
        hits: Files that were there.
        misses: Files that this process downloaded.
        waited: Files that another process was downloading.
        fetched_bytes: Bytes downloaded.
        wait_s: Seconds spent on files that were not there.
        evictions: Files that this process evicted.
        retries: Attempts after a first one that failed.
    """

    hits: int = 0
    misses: int = 0
    waited: int = 0
    fetched_bytes: int = 0
    wait_s: float = 0.0
    evictions: int = 0
    retries: int = 0

    def __add__(self, other: CacheMetrics) -> CacheMetrics:
        return CacheMetrics(*map(add, _numbers(self), _numbers(other)))

    def __sub__(self, other: CacheMetrics) -> CacheMetrics:
        return CacheMetrics(*map(sub, _numbers(self), _numbers(other)))


_numbers = attrgetter("hits", "misses", "waited", "fetched_bytes", "wait_s", "evictions", "retries")


class Place:
    """Where a cache keeps a file, or would, and what a process knows of it.

    Attributes:
        key: Of the file: its URL, name, size and version, digested. A file of two roots is two files.
        names: Those that it may have.
        path: The one that it had when it was last seen.
        size_bytes: Its size.
        seen: The announcement's stamp when it was there, used, and as large as it should be; None: never seen.
    """

    __slots__ = ("key", "names", "path", "seen", "size_bytes")

    def __init__(self, key: str, names: tuple[str, str], size_bytes: int) -> None:
        self.key = key
        self.names = names
        self.path = names[0]
        self.size_bytes = size_bytes
        self.seen: object = None


class Cache:
    """The cache of this node. Pickles, and works in forked children: it connects to the directory on first use.

    Args:
        directory: Where it is, on a disk of this node; None for ``AIR_NB_CACHE_DIR``, else the user's cache directory.
        limits: What it may use; None for ``AIR_NB_CACHE_MAX_BYTES`` and ``AIR_NB_CACHE_MIN_FREE_BYTES``.
        retries: How patiently a file is tried.

    Raises:
        DataError: The directory is on a network file system, where locks and links do not hold.
        ValueError: A variable is not a number of bytes.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        limits: Limits | None = None,
        retries: Retries | None = None,
    ) -> None:
        self.directory = str(Path(directory).absolute()) if directory is not None else str(default_directory())
        if is_network_path(Path(self.directory)):
            msg = f"the cache {self.directory} is on a network file system: set AIR_NB_CACHE_DIR to a disk of this node"
            raise DataError(msg)
        self.limits = limits or default_limits()
        self.retries = retries or Retries()
        self._space = Space(self.directory, self.limits)
        self._owner: Owner | None = None
        self._counts: dict[str, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_owner": None, "_counts": {}}

    @property
    def misses(self) -> int:
        """Of ``metrics``."""
        return int(self._counts.get("misses", 0))

    def metrics(self) -> CacheMetrics:
        """What this cache object did in this process (in each loader worker there is another one)."""
        return CacheMetrics(**self._counts)  # type: ignore[arg-type]  # whole numbers, but for the seconds

    def lease(self, entry: Entry, *, storage_options: Mapping[str, Any] | None = None) -> Lease:
        """A local copy of a file that stays until the lease is released.

        Args:
            entry: The file.
            storage_options: What fsspec's file system takes.

        Raises:
            DataError: It can't be downloaded, or there is no room for it; the message says why and what to do.
        """
        owner = self._connect()
        place = self.place(entry)
        lease = self._try_lease(owner, place)
        if lease is not None:
            self._count(hits=1)
            return lease
        owner.announcement.shrink()
        started_at = time.monotonic()
        try:
            return self._lease_missing(owner, place, entry, storage_options or {})
        finally:
            self._count(wait_s=time.monotonic() - started_at)

    def place(self, entry: Entry) -> Place:
        """Where a file is, if it is there."""
        key = _key(entry)
        root = _digest_of_root(entry.url.removesuffix(entry.path))
        return Place(key, self._space.names.possible(key, root, _safe_path(entry.path)), entry.size_bytes)

    def find(self, place: Place) -> os.stat_result | None:
        """Look whether a file is there, as large as it should be; the place has its name then."""
        for name in place.names:
            try:
                status = os.stat(name)  # noqa: PTH116 - pathlib takes twice as long
            except (FileNotFoundError, NotADirectoryError):
                continue
            if status.st_size == place.size_bytes and self._space.names.is_of(place.key, status):
                place.path = name
                return status
        return None

    def reading(self, places: Sequence[Place]) -> Reading:
        """Use of files that are there, for the length of a ``with`` block: for less than a `lease` on each.

        Args:
            places: Of the files, one of which is read at a time.
        """
        return Reading(self, self._connect(), places)

    def _connect(self) -> Owner:
        owner = self._owner
        if owner is None or not owner.is_of_use:
            private_directory(Path(self.directory))
            self._space.open()
            owner = self._owner = Owner.of(self.directory)
        return owner

    def _try_lease(self, owner: Owner, place: Place) -> Lease | None:
        """Lease a file if it is there and as large as it should be."""
        for name in place.names:
            descriptor = self._space.hold(name)
            if descriptor is None:
                continue
            try:
                status = os.fstat(descriptor)  # of the very file that can't go any more
                if status.st_size == place.size_bytes and self._space.names.is_of(place.key, status):
                    _touch(name, status)
                    link = owner.new_name()
                    os.link(self._space.names.object_path(place.key), link)
                    place.path = name
                    return Lease(name, link, owner)
            finally:
                unlock_and_close(descriptor)
        return None

    def _lease_missing(self, owner: Owner, place: Place, entry: Entry, options: Mapping[str, Any]) -> Lease:
        Path(self._space.names.object_path(place.key)).parent.mkdir(mode=0o700, exist_ok=True)
        link = owner.new_name()
        with lock_file(f"{self.directory}/locks/{place.key}", timeout_s=self._patience_s(entry)):
            lease = self._try_lease(owner, place)
            if lease is not None:
                self._count(waited=1)
                return lease

            def attempt() -> None:  # the second one may find what the first one could not give a name
                name = self._space.adopt(place.key, place.size_bytes, place.names, link)
                if name is None:
                    self._space.discard(place.key, place.names)
                    name = self._download(place, entry, options, link)
                place.path = name

            self._evicting(entry, attempt)
            return Lease(place.path, link, owner)

    def _download(self, place: Place, entry: Entry, options: Mapping[str, Any], link: str) -> str:
        from air_nb.data.remote import download  # fsspec's asynchronous part takes 50 ms to import

        def attempt() -> None:
            download(entry, target, options, timeout_s=self.retries.timeout_s + entry.size_bytes / 2**20)

        target, evicted = self._space.reserve(place.key, entry.size_bytes, entry.url)
        self._count(evictions=evicted)
        try:
            retrying(f"fetching {entry.url}", attempt, self.retries, on_retry=lambda: self._count(retries=1))
            target.chmod(0o400)  # what somebody opened for writing by mistake would be wrong for all
            name = self._space.publish(place.key, entry.size_bytes, target, place.names, link)
        finally:
            self._space.cancel(target, entry.size_bytes)  # nothing, if it was published
        self._count(misses=1, fetched_bytes=entry.size_bytes)
        return name

    def _evicting(self, entry: Entry, attempt: Callable[[], None]) -> None:
        """Call a function again, after an eviction, while the disk is full although the ledger does not think so."""
        for _ in range(_FULL_DISK_TRIES):
            try:
                return attempt()
            except DataError:
                raise
            except Exception as error:  # fsspec's back ends raise what they like
                evicted = self._space.evict(max(entry.size_bytes, 1)) if classify(error) is Fault.NO_SPACE else 0
                self._count(evictions=evicted)
                if not evicted:
                    raise DataError(self._failure(entry, error)) from error
        msg = f"the disk of {self.directory} is full again as soon as files are evicted: others write to it too"
        raise DataError(msg)

    def _failure(self, entry: Entry, error: Exception) -> str:
        fault = classify(error)
        advice = {
            Fault.PERMANENT: "trying again would not help: check that it exists and may be read",
            Fault.TRANSIENT: "check the network and the server",
            Fault.NO_SPACE: f"the disk of {self.directory} is full and no cached file is unused: free some space",
        }[fault]
        notes = "; ".join(getattr(error, "__notes__", ()))
        return f"{entry.url} could not be fetched: {type(error).__name__}: {error} ({notes}). {advice.capitalize()}"

    def _patience_s(self, entry: Entry) -> float:
        """How long the download of a file may take in another process, at most."""
        attempt_s = self.retries.timeout_s + entry.size_bytes / 2**20 + self.retries.longest_wait_s
        return self.limits.patience_s + self.retries.attempts * attempt_s

    def _count(self, **more: float) -> None:
        for name, number in more.items():
            self._counts[name] = self._counts.get(name, 0) + number


class Reading:
    """Files of the cache in use by a ``with`` block. See ``Cache.reading``."""

    __slots__ = ("_announcement", "_cache", "_is_announced", "_owner", "_places")

    def __init__(self, cache: Cache, owner: Owner, places: Sequence[Place]) -> None:
        self._cache = cache
        self._owner = owner  # its files are closed when it goes
        self._announcement = owner.announcement
        self._places = places
        self._is_announced = False

    def __enter__(self) -> Self:
        self._is_announced = self._announcement.begin(self, [place.key for place in self._places])
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_announced = False
        self._announcement.end(self)

    def paths(self, first: int = 0) -> Iterator[str]:
        """Paths of the files, each of which stays until the next one is asked for; no more if one can't be had so.

        That one may be there all the same: a lease tells. A file that was there a moment ago still is, unless anything
        has been evicted since.

        Args:
            first: Number of the first one.
        """
        if not self._is_announced:
            return
        announcement, places, number = self._announcement, self._places, first
        try:
            for number in range(first, len(places)):
                if not announcement.covers(number):
                    return
                place = places[number]
                if place.seen is not announcement.stamp and not self.check(place):
                    return
                yield place.path
            number = len(places)
        finally:
            self._cache._count(hits=number - first)  # noqa: SLF001 - a part of the cache

    def check(self, place: Place) -> bool:
        """Look whether a file is there, as large as it should be."""
        place.seen = None
        status = self._cache.find(place)
        if status is None:
            return False
        _touch(place.path, status)
        place.seen = self._announcement.stamp
        return True


def _touch(path: str, status: os.stat_result) -> None:
    """Note that a cached file is used now, unless it was a moment ago: that would take as long as a hit."""
    now_ns = time.time_ns()
    if now_ns - status.st_atime_ns > _TOUCH_AFTER_NS:
        os.utime(path, ns=(now_ns, status.st_mtime_ns))


def default_directory() -> Path:
    """``AIR_NB_CACHE_DIR``, else the user's cache directory, else (it is on a network file system) one below /tmp."""
    if chosen := os.environ.get("AIR_NB_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    user = Path(platformdirs.user_cache_dir("air_nb"), "files")
    return Path(tempfile.gettempdir(), f"air_nb-cache-{os.getuid()}") if is_network_path(user) else user


def default_limits() -> Limits:
    """``AIR_NB_CACHE_MAX_BYTES`` and ``AIR_NB_CACHE_MIN_FREE_BYTES``; the second also by the name that others document.

    Raises:
        ValueError: One is not a number.
    """
    free = _bytes_from("AIR_NB_CACHE_MIN_FREE_BYTES")
    return Limits(
        max_bytes=_bytes_from("AIR_NB_CACHE_MAX_BYTES"),
        min_free_bytes=_bytes_from("SGC_FSLAYER_MIN_FREE_DISK_BYTES") if free is None else free,
    )


def _bytes_from(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    if not text.isdecimal():
        msg = f"{variable}={text!r} is not a number of bytes, such as {64 * 2**30}"
        raise ValueError(msg)
    return int(text)


def _key(entry: Entry) -> str:
    return hashlib.sha256(
        f"{entry.url}\0{entry.path}\0{entry.size_bytes}\0{entry.version}".encode("utf-8", "surrogateescape")
    ).hexdigest()[:32]


@functools.lru_cache(maxsize=64)
def _digest_of_root(root: str) -> str:
    return hashlib.sha256(root.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _safe_path(path: str) -> str:
    """A name below the root as a name below a directory of ours: keys of object stores may hold ``..`` and more."""
    if path.isascii() and len(path) <= _NAME_MAX_BYTES and not _NEEDS_CARE.search(path):
        return path
    return "/".join(_safe_part(part) for part in path.split("/"))


def _safe_part(part: str) -> str:
    if part in {"", ".", ".."}:
        return f"%{part}"
    if len(os.fsencode(part)) <= _NAME_MAX_BYTES:
        return part
    return hashlib.sha256(os.fsencode(part)).hexdigest() + Path(part).suffix[-16:]
