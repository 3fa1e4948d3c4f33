"""Copies of remote files on this node's disk, shared by all its ranks and loader workers. Loads no torch.

A file is downloaded once, by whoever needs it first; the others wait for it. What was not used for longest goes when
the cap or the disk's floor is reached, before the next download starts. A file in use never goes: see leases.py.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from air_nb.data.fetch import Fault, Retries, classify, retrying
from air_nb.data.leases import Lease, Owner
from air_nb.data.locks import lock_file
from air_nb.data.manifest import Entry
from air_nb.data.space import Limits, Space
from air_nb.errors import DataError
from air_nb.runs.paths import is_network_path, private_directory

__all__ = ["Cache", "CacheMetrics", "Reading", "default_directory", "default_limits"]

_NAME_MAX_BYTES = 255
_FULL_DISK_TRIES = 5
_NEEDS_CARE = re.compile(r"(?:^|/)(?:\.{0,2})(?:/|$)")
_TOUCH_AFTER_NS = 10 * 10**9
"""How old the time of the last use may be: which of two files was used later is known to this precision."""


@dataclass(frozen=True, slots=True)
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
        return CacheMetrics(*(mine + theirs for mine, theirs in zip(self._values(), other._values(), strict=True)))

    def __sub__(self, other: CacheMetrics) -> CacheMetrics:
        return CacheMetrics(*(mine - theirs for mine, theirs in zip(self._values(), other._values(), strict=True)))

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


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
        key = _key(entry)
        lease = self._try_lease(owner, key, entry)
        if lease is not None:
            self._count(hits=1)
            return lease
        started_at = time.monotonic()
        try:
            return self._lease_missing(owner, key, entry, storage_options or {})
        finally:
            self._count(wait_s=time.monotonic() - started_at)

    def reading(self, entry: Entry, *, storage_options: Mapping[str, Any] | None = None) -> Reading:
        """A local copy of a file for the length of a ``with`` block: what `lease` does, for less.

        Args:
            entry: The file.
            storage_options: What fsspec's file system takes.
        """
        return Reading(self, entry, storage_options)

    def _connect(self) -> Owner:
        owner = self._owner
        if owner is None or not owner.is_mine:
            private_directory(Path(self.directory))
            self._space.open()
            owner = self._owner = Owner.of(self.directory)
        return owner

    def _try_hold(self, key: str, entry: Entry) -> tuple[str, int] | None:
        """Hold a file if it is there and as large as it should be: its path, and what to close when it is done with."""
        path = self._path(key, entry)
        descriptor = self._space.hold(path)
        if descriptor is None:
            return None
        status = os.fstat(descriptor)
        if status.st_size != entry.size_bytes:
            os.close(descriptor)
            return None
        now_ns = time.time_ns()
        if now_ns - status.st_atime_ns > _TOUCH_AFTER_NS:  # a third of what a hit would cost
            os.utime(descriptor, ns=(now_ns, status.st_mtime_ns))
        return path, descriptor

    def _try_lease(self, owner: Owner, key: str, entry: Entry) -> Lease | None:
        held = self._try_hold(key, entry)
        if held is None:
            return None
        path, descriptor = held
        link = owner.new_name()
        try:
            os.link(path, link)
        finally:
            os.close(descriptor)
        return Lease(path, link, owner)

    def _lease_missing(self, owner: Owner, key: str, entry: Entry, options: Mapping[str, Any]) -> Lease:
        kept = Path(self._space.object_path(key))
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        path, link = self._path(key, entry), owner.new_name()
        with lock_file(f"{self.directory}/locks/{key}", timeout_s=self._patience_s(entry)):
            lease = self._try_lease(owner, key, entry)
            if lease is not None:
                self._count(waited=1)
                return lease
            if kept.exists() and kept.stat().st_size == entry.size_bytes:  # a process was killed before it had a name
                self._space.publish(key, 0, None, path, link)
            else:
                self._space.discard(key)
                self._evicting(entry, lambda: self._download(key, entry, options, path, link))
            return Lease(path, link, owner)

    def _download(self, key: str, entry: Entry, options: Mapping[str, Any], path: str, link: str) -> None:
        from air_nb.data.remote import download  # fsspec's asynchronous part takes 50 ms to import

        def attempt() -> None:
            download(entry, target, options, timeout_s=self.retries.timeout_s + entry.size_bytes / 2**20)

        target, evicted = self._space.reserve(key, entry.size_bytes, entry.url)
        self._count(evictions=evicted)
        try:
            retrying(f"fetching {entry.url}", attempt, self.retries, on_retry=lambda: self._count(retries=1))
            target.chmod(0o400)  # what somebody opened for writing by mistake would be wrong for all
            self._space.publish(key, entry.size_bytes, target, path, link)
        finally:
            self._space.cancel(target, entry.size_bytes)  # nothing, if it was published
        self._count(misses=1, fetched_bytes=entry.size_bytes)

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

    def _path(self, key: str, entry: Entry) -> str:
        return f"{self._space.path_directory(key)}/{_safe_path(entry.path)}"

    def _count(self, **more: float) -> None:
        for name, number in more.items():
            self._counts[name] = self._counts.get(name, 0) + number


class Reading:
    """A file of the cache in use by a ``with`` block, whose value is its path. See ``Cache.reading``.

    A file that is there is kept by a lock on it alone, as no other process has to learn of its use.
    """

    __slots__ = ("_cache", "_descriptor", "_entry", "_lease", "_options")

    def __init__(self, cache: Cache, entry: Entry, options: Mapping[str, Any] | None) -> None:
        self._cache = cache
        self._entry = entry
        self._options = options
        self._descriptor: int | None = None
        self._lease: Lease | None = None

    def __enter__(self) -> str:
        cache = self._cache
        cache._connect()  # noqa: SLF001 - a part of the cache
        held = cache._try_hold(_key(self._entry), self._entry)  # noqa: SLF001
        if held is None:
            self._lease = cache.lease(self._entry, storage_options=self._options)
            return self._lease.path
        cache._count(hits=1)  # noqa: SLF001
        path, self._descriptor = held
        return path

    def __exit__(self, *_error: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self._lease is not None:
            self._lease.release()


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
        f"{entry.url}\0{entry.size_bytes}\0{entry.version}".encode("utf-8", "surrogateescape")
    ).hexdigest()[:32]


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
