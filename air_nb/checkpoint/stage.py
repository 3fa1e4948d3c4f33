"""Directories on this machine's own disk in which files are prepared for a slow storage, or kept while they are read.

They live as long as a process that uses them: each user holds a shared ``flock`` on the directory's lock file, which
the system drops however the process ends. Whoever opens a stage next deletes those that nobody holds. Torch-free.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import weakref
from contextlib import AbstractContextManager
from pathlib import Path

from air_nb.data.locks import lock_file
from air_nb.runs.forked import abandon_in_children
from air_nb.runs.paths import private_directory

__all__ = ["Stage", "stages_directory"]

_LOCK = ".lock"
_LOCK_TIMEOUT_S = 1800.0  # as long as ranks wait for each other


def stages_directory() -> Path:
    """Where all stages of this user are: below ``TMPDIR``, which must have room for a rank's shards."""
    return private_directory(private_directory(Path(tempfile.gettempdir()) / f"air_nb-{os.getuid()}") / "stage")


class Stage:
    """One stage, held until it is closed, garbage, or its process has ended.

    Args:
        key: Processes of this machine that name the same key share the directory; None for one of our own.

    Raises:
        OSError: The temporary directory can't be written.
    """

    def __init__(self, key: str | None = None) -> None:
        _sweep(stages_directory())
        self.path = stages_directory() / (key or f"own-{secrets.token_hex(8)}")
        self._descriptor = _hold(self.path)
        self._close = weakref.finalize(self, _release, self.path, self._descriptor)
        abandon_in_children(self)

    def abandon(self) -> None:
        """Let go in a forked child: the stage is its parent's."""
        if self._close.detach():
            os.close(self._descriptor)

    def close(self) -> None:
        """Let go; the last one deletes the directory. Closing again does nothing."""
        self._close()

    def exclusively(self, name: str) -> AbstractContextManager[None]:
        """Hold the right to make one file: another process of this machine that wants it waits here meanwhile.

        Raises:
            DataError: Another process has had it for half an hour.
        """
        return lock_file(f"{self.path / name}.lock", timeout_s=_LOCK_TIMEOUT_S)


def _hold(path: Path) -> int:
    """Make a stage directory if need be and hold it; returns the descriptor that does."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # a sweep was faster
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is_still(path / _LOCK, descriptor):
            return descriptor
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether a path names an open file, and not a new one, or none, because a sweep was faster."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _release(path: Path, descriptor: int) -> None:
    os.close(descriptor)
    _delete_if_free(path)


def _sweep(directory: Path) -> None:
    for path in directory.iterdir():
        _delete_if_free(path)


def _delete_if_free(path: Path) -> None:
    """Delete a stage that nobody holds."""
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # being made, or being deleted by somebody else
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_still(path / _LOCK, descriptor):
            # The lock file goes last: until then nobody else can believe to hold the directory.
            for entry in path.iterdir():
                if entry.name != _LOCK:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
            (path / _LOCK).unlink()
            path.rmdir()
    except OSError:  # held, or somebody has just put a new lock file there: then it is theirs
        pass
    finally:
        os.close(descriptor)
