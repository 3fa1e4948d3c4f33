"""Which files of the cache a process is reading: said once for a whole batch, for whoever evicts to see.

A lock on each file would cost more than reading a small one. So a process writes the keys of a batch's files to a note
of its own, and then looks whether somebody has the lock of the cache, as whoever evicts has. If nobody has, the files
stay: who takes the lock from now on reads the note first. If somebody has, the note may have come too late for him: it
does not count, and each file needs a lease.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Sequence

from air_nb.data.locks import try_lock

__all__ = ["EVICTIONS", "EVICTIONS_AT", "LEDGER", "NOTE", "Announcement", "is_alive", "read_note"]

NOTE = "reading"
"""Name of the note in a process's directory."""

LEDGER = "ledger"
"""Name of the ledger in the cache: see space.py."""
EVICTIONS = struct.Struct("<q")
EVICTIONS_AT = 16
"""Where the number of evictions is in it. Who evicts raises it first, with the lock of the cache."""

_COUNT_BYTES = 8
_KEY_BYTES = 32


class Announcement:
    """The note of one process. One block of code at a time has it; others, in other threads or nested, get leases.

    Args:
        cache: The cache's directory.
        directory: That of the process in it.

    Attributes:
        evictions: How often anything was evicted before the files were announced, as it is in the ledger.
    """

    def __init__(self, cache: str, directory: str) -> None:
        self.evictions = b""
        with contextlib.ExitStack() as opened:
            self._note = _opened(opened, f"{directory}/{NOTE}", os.O_WRONLY | os.O_CREAT)
            try_lock(self._note)  # as long as this process lives
            self._write(())  # has a disk block from now on, whatever becomes of the disk
            self._cache = _opened(opened, cache, os.O_RDONLY | os.O_DIRECTORY)
            self._ledger = _opened(opened, f"{cache}/{LEDGER}", os.O_RDONLY | os.O_CREAT)
            opened.pop_all()
        self.descriptors = (self._note, self._cache, self._ledger)
        self._taken = threading.Lock()
        self._writing = threading.Lock()
        self._current = ""
        self._is_whole = False

    def begin(self, keys: Sequence[str]) -> bool:
        """Announce files, until ``end``.

        Args:
            keys: Of the files.

        Returns:
            Whether the note is the caller's to use; then ``covers`` says of each file whether it stays.
        """
        if not self._taken.acquire(blocking=False):
            return False
        self._is_whole = self._announce(keys)
        return True

    def covers(self, key: str) -> bool:
        """Whether a file that was announced, and is there now, stays until this is asked about another one."""
        self._current = key  # in this order: shrink() makes them in the other one
        return self._is_whole or self._announce((key,))

    def end(self) -> None:
        """Announce nothing any more."""
        with self._writing:
            self._current = ""
            self._is_whole = False
            self._write(())
        self._taken.release()

    def shrink(self) -> None:
        """Announce the file that is being read alone: this process is about to wait for room.

        Else processes would wait for each other's files, none of which is being read.
        """
        if not self._is_whole:
            return
        with self._writing:
            self._is_whole = False
            self._write((self._current,) if self._current else ())

    def _announce(self, keys: Sequence[str]) -> bool:
        with self._writing:
            try:
                self._write(keys)
            except OSError:  # a full disk, for a note that is longer than any before
                self._write(())
                return False
            if not try_lock(self._cache, shared=True):
                return False
            fcntl.flock(self._cache, fcntl.LOCK_UN)
            self.evictions = os.pread(self._ledger, EVICTIONS.size, EVICTIONS_AT)
            return True

    def _write(self, keys: Sequence[str]) -> None:
        os.pwrite(self._note, f"{len(keys):0{_COUNT_BYTES}}{''.join(keys)}".encode(), 0)


def _opened(opened: contextlib.ExitStack, path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    opened.callback(os.close, descriptor)
    return descriptor


def is_alive(directory: str) -> bool:
    """Whether the process with that directory lives. The caller has the lock of the cache."""
    try:
        note = os.open(f"{directory}/{NOTE}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # killed before it had one
        return False
    try:
        return not try_lock(note)
    finally:
        os.close(note)


def read_note(directory: str) -> list[str]:
    """The keys that a process has announced.

    Args:
        directory: That of the process. The caller has the lock of the cache.
    """
    try:
        note = os.open(f"{directory}/{NOTE}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        count = int(os.pread(note, _COUNT_BYTES, 0) or 0)
        keys = os.pread(note, count * _KEY_BYTES, _COUNT_BYTES).decode()
    finally:
        os.close(note)
    return [keys[start : start + _KEY_BYTES] for start in range(0, len(keys), _KEY_BYTES)]
