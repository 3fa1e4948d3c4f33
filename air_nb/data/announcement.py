"""Which files of the cache a process is reading: said once for a whole batch, for whoever evicts to see.

A lock on each file would cost more than reading a small one. So a process writes the keys of a batch's files to a note
of its own, and then looks whether somebody has the lock of the cache, as whoever evicts has. If nobody has, the files
stay: who takes the lock from now on reads the note first. If somebody has, the note may have come too late for him: it
does not count, and each file needs a lease.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence

from air_nb.data.locks import try_lock

__all__ = ["NOTE", "Announcement", "read_note"]

NOTE = "reading"
"""Name of the note in a process's directory."""

_COUNT_BYTES = 8
_KEY_BYTES = 32


class Announcement:
    """The note of one process. One block of code at a time has it; others, in other threads or nested, get leases.

    Args:
        cache: The cache's directory.
        directory: That of the process in it.
    """

    def __init__(self, cache: str, directory: str) -> None:
        self._note = os.open(f"{directory}/{NOTE}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._cache = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.descriptors = (self._note, self._cache)
        self._taken = threading.Lock()
        self._writing = threading.Lock()
        self._current = ""
        self._is_whole = False
        self._write(())  # has a disk block from now on, whatever becomes of the disk

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
            if try_lock(self._cache, shared=True):
                fcntl.flock(self._cache, fcntl.LOCK_UN)
                return True
            return False

    def _write(self, keys: Sequence[str]) -> None:
        os.pwrite(self._note, f"{len(keys):0{_COUNT_BYTES}}{''.join(keys)}".encode(), 0)


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
