"""Which files of the cache a process is reading: said once for a whole batch, for whoever evicts to see.

A lock on each file would cost more than reading a small one. So a process writes the keys of a batch's files to a note
of its own, and then looks whether somebody has the lock of the cache, as whoever evicts has. If nobody has, the files
stay: who takes the lock from now on reads the note first. If somebody has, the note may have come too late for him: it
does not count, and each file needs a lease.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Sequence

from air_nb.data.ledger import look, open_ledger
from air_nb.data.locks import try_lock, unlock_and_close

__all__ = ["NOTE", "Announcement", "is_alive", "read_note"]

NOTE = "reading"
"""Name of the note in a process's directory. Its lock says that the process lives."""

_LOOK_AGAIN_S = 60.0
_COUNT_BYTES = 8
_KEY_BYTES = 32
_EMPTY = b"0" * _COUNT_BYTES


class Announcement:
    """The note of one process. One holder at a time has it; others, in other threads or nested, get leases.

    Nothing is left announced or locked by an interrupt, wherever it strikes, if ``end`` is called again after it.

    Args:
        cache: The cache's directory.
        directory: That of the process in it.

    Attributes:
        stamp: The same object as long as nothing has been evicted, as the ledger said when files were announced, and
            for a minute at most. What was seen of files then is still so.
    """

    def __init__(self, cache: str, directory: str) -> None:
        self.stamp = object()
        self._evictions = b""
        self._look_again_at_s = 0.0
        with contextlib.ExitStack() as opened:
            self._note = os.open(f"{directory}/{NOTE}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, self._note)
            try_lock(self._note)
            self._erase()  # has a disk block from now on, whatever becomes of the disk
            self._cache = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, self._cache)
            self._ledger = open_ledger(cache)
            opened.pop_all()
        self.descriptors: tuple[int, ...] = (self._note, self._cache, self._ledger)
        self._holder: object = None
        self._lock = threading.RLock()  # an interrupt may enter again what it has interrupted
        self._keys: Sequence[str] = ()
        self._current: int | None = None
        self._is_whole = False

    @property
    def is_there(self) -> bool:
        """Whether the note is where others look for it: the cache has not been deleted meanwhile."""
        return os.fstat(self._note).st_nlink > 0

    def begin(self, holder: object, keys: Sequence[str]) -> bool:
        """Announce files, until ``end``.

        Args:
            holder: Who reads them.
            keys: Of the files.

        Returns:
            Whether the note is the holder's now; then ``covers`` says of each file whether it stays.
        """
        with self._lock:
            if self._holder is not None or not self.descriptors:
                return False
            self._holder = holder
            self._keys = keys
            self._is_whole = self._announce(keys)
            return True

    def covers(self, number: int) -> bool:
        """Whether a file that was announced, and is there now, stays until this is asked about another one.

        Args:
            number: Of the file among those that were announced.
        """
        self._current = number  # in this order: shrink() makes them in the other one
        return self._is_whole or self._announce((self._keys[number],))

    def end(self, holder: object) -> None:
        """Announce nothing any more, if the note is still that holder's."""
        if self._holder is not holder:  # nobody else makes it so
            return
        with self._lock:
            self._is_whole = False
            self._current = None
            self._erase()
            self._holder = None

    def shrink(self) -> None:
        """Announce the file that is being read alone: this process is about to wait for room.

        Else processes would wait for each other's files, none of which is being read.
        """
        with self._lock:
            if self._is_whole:
                self._is_whole = False
                self._write(() if self._current is None else (self._keys[self._current],))

    def abandon(self) -> None:
        """Let go of it in a forked child: it is the parent's."""
        descriptors, self.descriptors = self.descriptors, ()
        self._holder = None
        self._is_whole = False
        self._lock = threading.RLock()
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _announce(self, keys: Sequence[str]) -> bool:
        with self._lock:
            if not self.descriptors:
                return False
            try:
                self._write(keys)
            except OSError:  # a full disk, for a note that is longer than any before
                self._erase()
                return False
            try:
                if not try_lock(self._cache, shared=True):
                    return False
            finally:
                fcntl.flock(self._cache, fcntl.LOCK_UN)
            evictions, is_waited_for = look(self._ledger)
            now_s = time.monotonic()
            if evictions != self._evictions or now_s > self._look_again_at_s:
                self.stamp, self._evictions, self._look_again_at_s = object(), evictions, now_s + _LOOK_AGAIN_S
            return not is_waited_for or len(keys) == 1

    def _write(self, keys: Sequence[str]) -> None:
        note = f"{len(keys):0{_COUNT_BYTES}}{''.join(keys)}".encode()
        if os.pwrite(self._note, note, 0) < len(note):  # a part fitted on the disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), NOTE)

    def _erase(self) -> None:
        with contextlib.suppress(OSError):  # there is nothing to erase on a disk that has been full from the start
            os.pwrite(self._note, _EMPTY, 0)


def is_alive(directory: str) -> bool:
    """Whether the process with that directory lives. The caller has the lock of the cache."""
    try:
        note = os.open(f"{directory}/{NOTE}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # killed before it had one
        return False
    try:
        return not try_lock(note)
    finally:
        unlock_and_close(note)


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
