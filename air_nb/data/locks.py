"""Locks between the processes of a node: ``flock``, which the kernel gives up for a process however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from air_nb.errors import DataError

__all__ = ["lock_directory", "lock_file", "try_lock", "unlock_and_close", "wait_for_lock"]

_FIRST_POLL_S = 0.0005
_LONGEST_POLL_S = 0.02


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file or directory if nobody else has it.

    The lock belongs to this opening of it: another ``os.open`` is another contender, in the same thread too.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def lock_directory(path: str, *, timeout_s: float) -> Iterator[None]:
    """Hold the lock of a directory.

    Raises:
        FileNotFoundError: There is no such directory.
        DataError: Others kept it for all that time.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        wait_for_lock(descriptor, path, timeout_s=timeout_s)
        yield
    finally:
        unlock_and_close(descriptor)


@contextlib.contextmanager
def lock_file(path: str, *, timeout_s: float) -> Iterator[None]:
    """Hold the lock of a file that exists only while it is held.

    Raises:
        DataError: Others kept it for all that time.
    """
    while True:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            wait_for_lock(descriptor, path, timeout_s=timeout_s)
            if not _is_at(descriptor, path):  # the holder before us has deleted it: a lock on nothing
                continue
            try:
                yield
            finally:
                Path(path).unlink(missing_ok=True)
            return
        finally:
            unlock_and_close(descriptor)


def unlock_and_close(descriptor: int) -> None:
    """Give up the lock of an open file and close it: closed alone, a child that was forked meanwhile would keep it."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), Path(path).stat())
    except FileNotFoundError:
        return False


def wait_for_lock(descriptor: int, path: str, *, shared: bool = False, timeout_s: float) -> None:
    """Lock an open file or directory when others have given it up.

    Raises:
        DataError: They kept it for all that time.
    """
    poll_s = _FIRST_POLL_S
    deadline = time.monotonic() + timeout_s
    while not try_lock(descriptor, shared=shared):
        if time.monotonic() > deadline:
            msg = f"{path} has been locked by another process for {timeout_s:.0f} s: see who with `lsof {path}`"
            raise DataError(msg)
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)
