"""Leases: a cached file stays where it is while somebody has one, and they end with the process that has them.

A lease is a hard link to the file, in a directory of the process that has it. So a file in use is one with more links
than its own, taking and giving back are one call of the kernel each, and what a killed process had is a directory whose
note (announcement.py) nobody has locked. Leases travel: unpickled in another process (a loader worker's parent) they
become that process's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from air_nb.data.announcement import Announcement, is_alive, read_note
from air_nb.data.locks import lock_directory
from air_nb.runs.forked import abandon_in_children

__all__ = ["LEASES", "Lease", "LeasedPath", "Owner", "being_read", "sweep_leases"]

LEASES = "leases"
"""Directory in the cache that has one directory for each process."""

_LOCK_TIMEOUT_S = 600.0


class Owner:
    """What one process has leased of one cache. ``Owner.of`` finds or makes it; it lasts while a lease or cache does.

    Args:
        cache: The cache's directory.
    """

    def __init__(self, cache: str) -> None:
        self.cache = cache
        self.directory = f"{cache}/{LEASES}/{secrets.token_hex(8)}"
        self._pid = os.getpid()
        self._numbers = itertools.count()
        with lock_directory(cache, timeout_s=_LOCK_TIMEOUT_S):  # else a sweep could take it before we have locked it
            Path(self.directory).mkdir(0o700)
            self.announcement = Announcement(cache, self.directory)
        descriptors = self.announcement.descriptors
        self._finalize = weakref.finalize(self, _close, descriptors, self.directory, self._pid)
        abandon_in_children(self)

    @classmethod
    def of(cls, cache: str) -> Owner:
        """This process's owner for a cache."""
        with _making:
            owner = _owners.get(cache)
            if owner is None or not owner.is_of_use:
                owner = _owners[cache] = cls(cache)
            return owner

    @property
    def is_mine(self) -> bool:
        """Whether this process made it, not the one that it was forked from."""
        return self._pid == os.getpid()

    @property
    def is_of_use(self) -> bool:
        """Whether it is this process's, and its cache has not been deleted since."""
        return self.is_mine and self.announcement.is_there

    def new_name(self) -> str:
        """A path for the link of a new lease."""
        return f"{self.directory}/{next(self._numbers):x}"

    def abandon(self) -> None:
        """Let go of the lock in a forked child: the leases are its parent's."""
        self._finalize.detach()
        self.announcement.abandon()


_owners: weakref.WeakValueDictionary[str, Owner] = weakref.WeakValueDictionary()
_making = threading.RLock()


def _forget_the_parents_lock() -> None:
    global _making  # noqa: PLW0603  # another thread of the parent may have it, and there is none here
    _making = threading.RLock()


os.register_at_fork(after_in_child=_forget_the_parents_lock)


def _close(descriptors: Iterable[int], directory: str, pid: int) -> None:
    if pid == os.getpid():
        _remove(directory)
        for descriptor in descriptors:
            os.close(descriptor)


class Lease:
    """The right to a cached file until ``release``, or until this object is gone.

    Args:
        path: The cached file.
        link: The link that keeps it.
        owner: Whose it is.
    """

    __slots__ = ("_is_held", "_link", "_owner", "path")

    def __init__(self, path: str, link: str, owner: Owner) -> None:
        self.path = path
        self._link = link
        self._owner = owner
        self._is_held = True

    def release(self) -> None:
        """Give the file back: from now on it may be evicted. Again: nothing happens."""
        is_held, self._is_held = self._is_held, False
        if is_held and self._owner.is_mine:  # a forked copy is not the lease
            with contextlib.suppress(FileNotFoundError):
                Path(self._link).unlink()

    def __del__(self) -> None:
        self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        """Hand the lease over to the process that unpickles it; if none does, it lasts as long as this process."""
        is_held, self._is_held = self._is_held, False
        return _claim, (self.path, self._link if is_held else None, self._owner.cache)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def _claim(path: str, link: str | None, cache: str) -> Lease:
    """Make a lease that came from another process ours; one that had ended, or was swept meanwhile, holds nothing."""
    owner = Owner.of(cache)
    own_link = owner.new_name()
    if link is not None:
        with contextlib.suppress(FileNotFoundError):
            Path(link).rename(own_link)
    return Lease(path, own_link, owner)


class LeasedPath(str):
    """A path of a cached file, leased as long as this very string exists. Everywhere else it is a string."""

    __slots__ = ("_lease",)
    _lease: Lease

    def __new__(cls, path: str, lease: Lease) -> Self:
        """Make a path from its text and the lease."""
        made = super().__new__(cls, path)
        made._lease = lease
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return LeasedPath, (str(self), self._lease)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def sweep_leases(cache: str) -> None:
    """Delete the leases of processes that have died. The caller has the lock of the cache."""
    for directory in os.scandir(f"{cache}/{LEASES}"):
        if not is_alive(directory.path):
            _remove(directory.path)


def being_read(cache: str) -> set[str]:
    """Keys of the files that processes are reading without a lease. The caller has swept, and has the cache's lock."""
    return {key for directory in os.scandir(f"{cache}/{LEASES}") for key in read_note(directory.path)}


def _remove(directory: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        for link in list(os.scandir(directory)):
            Path(link.path).unlink(missing_ok=True)
        Path(directory).rmdir()
