"""Where checkpoints lie: one small interface over directories (network and FUSE mounts too) and URLs. Torch-free.

Names are relative to the store's root, with ``/`` between directories. A store may be used by several threads and is
safe to pickle and to carry over a fork: connections are made when first needed, by each process for itself.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from air_nb.data.fetch import Retries, retrying
from air_nb.errors import CheckpointError
from air_nb.runs.paths import is_network_path

__all__ = ["BLOCK_BYTES", "DirectoryStore", "Store", "StoredFile", "open_store", "try_again"]

BLOCK_BYTES = 16 * 2**20
"""Piece in which files come from far away."""
_LOCAL_BLOCK_BYTES = 256 * 2**10  # stays in a core's cache between reading and hashing: 5 GiB/s instead of 1 for 16 MiB

_T = TypeVar("_T")
_RETRIES = Retries()


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One entry of a listing.

    Attributes:
        size_bytes: Its size.
        modified_at: UTC seconds since the epoch; None if the storage does not say.
    """

    size_bytes: int
    modified_at: float | None


class Store(ABC):
    """A directory or a prefix of an object store.

    Missing files raise FileNotFoundError everywhere, files that must not exist FileExistsError, everything else that
    the storage refuses OSError.

    Attributes:
        url: The root, as it was given.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def path(self) -> Path | None:
        """The root as a directory that this process can open; None for an object store."""
        return None

    @property
    def is_local(self) -> bool:
        """Whether files can be opened under ``path``."""
        return self.path is not None

    @property
    def is_remote(self) -> bool:
        """Whether bytes cross a network or FUSE: files are then better prepared on a disk of this machine."""
        return True

    @abstractmethod
    def child(self, name: str) -> Store:
        """The store of a directory below this one."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a file."""

    @abstractmethod
    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``start`` on; fewer at the end of the file."""

    @abstractmethod
    def blocks(self, name: str) -> Iterator[bytes]:
        """The content of a file in pieces of at most about ``BLOCK_BYTES``."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file: readers see all of it or what was there before."""

    @abstractmethod
    def upload(self, name: str, local_path: Path) -> None:
        """Copy a whole local file here, sequentially. A crash may leave part of it."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write a file only if there is none of that name.

        Raises:
            FileExistsError: There is one; it is unchanged.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Size of a file in bytes."""

    @abstractmethod
    def list(self, directory: str = "") -> dict[str, StoredFile]:
        """The files directly in a directory by their names in it; none if there is no such directory."""

    @abstractmethod
    def directories(self, directory: str = "") -> tuple[str, ...]:
        """Names of the directories directly in a directory; none if there is no such directory."""

    @abstractmethod
    def delete(self, name: str = "") -> None:
        """Delete a file, or a directory with all below it; nothing if there is none."""

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True


def try_again(what: str, action: Callable[[], _T]) -> _T:
    """Do what crosses a network, a few times if it fails in a way that may pass."""
    return retrying(what, action, _RETRIES, on_retry=lambda: None)


def open_store(root: str | os.PathLike[str]) -> Store:
    """The store of a directory, which need not exist yet, or of a URL (``s3://``, or any that fsspec knows).

    Raises:
        CheckpointError: The root is a file, or no installed package knows its kind of URL.
    """
    url = os.fspath(root)
    if url.startswith("file://"):
        url = url.removeprefix("file://")
    if "://" not in url:
        return DirectoryStore(url)
    from air_nb.checkpoint.remote import open_remote  # fsspec and obstore: 50 ms that a directory need not cost

    return open_remote(url)


class DirectoryStore(Store):
    """A directory of this machine: a disk, or a network or FUSE mount.

    Args:
        path: The directory, made when the first file is written.

    Raises:
        CheckpointError: It is a file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.url = os.fspath(path)
        self._path = Path(path).absolute()
        self._remote: bool | None = None
        if self._path.exists() and not self._path.is_dir():
            msg = f"{self.url} is a file: checkpoints need a directory; give another path, or remove the file"
            raise CheckpointError(msg)

    @property
    def path(self) -> Path:
        """The directory."""
        return self._path

    @property
    def is_remote(self) -> bool:
        """Whether the directory is on a network file system or a FUSE mount."""
        if self._remote is None:
            self._remote = is_network_path(self._path) or _file_system(self._path).startswith("fuse")
        return self._remote

    def child(self, name: str) -> DirectoryStore:
        """The store of a directory below this one."""
        return DirectoryStore(self._path / name)

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return self._try(f"read {name}", (self._path / name).read_bytes)

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``start`` on."""

        def read() -> bytes:
            with (self._path / name).open("rb") as file:
                file.seek(start)
                return file.read(length)

        return self._try(f"read {name}", read)

    def blocks(self, name: str) -> Iterator[bytes]:
        """The content of a file in pieces."""
        size_bytes = BLOCK_BYTES if self.is_remote else _LOCAL_BLOCK_BYTES
        with (self._path / name).open("rb", buffering=0) as file:
            while block := self._try(f"read {name}", lambda: file.read(size_bytes)):
                yield block

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file by a temporary name, fsync and rename."""
        self._try(f"write {name}", lambda: self._write(name, data))

    def _write(self, name: str, data: bytes) -> None:
        with self._temporary(name, data) as temporary:
            temporary.replace(self._path / name)
        _sync_directory((self._path / name).parent)

    def upload(self, name: str, local_path: Path) -> None:
        """Copy a whole local file here, under its final name: a rename is another copy on mounts of object stores."""

        def copy() -> None:
            target = self._path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with local_path.open("rb") as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, BLOCK_BYTES)
                file.flush()
                os.fsync(file.fileno())
            _sync_directory(target.parent)

        self._try(f"copy {local_path} to {name}", copy)

    def create(self, name: str, data: bytes) -> None:
        """Write a file only if there is none of that name: it appears with all its content, in one step.

        Where the file system has no links (FUSE mounts of object stores) it is made exclusively and then filled: a
        crash in between leaves it empty.
        """
        target = self._path / name
        with self._temporary(name, data) as temporary:
            try:
                os.link(temporary, target)
            except FileExistsError:
                raise
            except OSError:
                with target.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
        _sync_directory(target.parent)

    def size(self, name: str) -> int:
        """Size of a file in bytes."""
        return self._try(f"look at {name}", lambda: (self._path / name).stat().st_size)

    def list(self, directory: str = "") -> dict[str, StoredFile]:
        """The files directly in a directory."""
        found = {}
        for entry in self._entries(directory):
            with contextlib.suppress(FileNotFoundError):  # deleted since the listing
                if entry.is_file():
                    status = entry.stat()
                    found[entry.name] = StoredFile(status.st_size, status.st_mtime)
        return found

    def directories(self, directory: str = "") -> tuple[str, ...]:
        """Names of the directories directly in a directory."""
        return tuple(sorted(entry.name for entry in self._entries(directory) if entry.is_dir()))

    def _entries(self, directory: str) -> tuple[os.DirEntry[str], ...]:
        def scan() -> tuple[os.DirEntry[str], ...]:
            try:
                with os.scandir(self._path / directory) as entries:
                    return tuple(entries)
            except FileNotFoundError:
                return ()

        return self._try(f"list {directory or self.url}", scan)

    def delete(self, name: str = "") -> None:
        """Delete a file, or a directory with all below it."""
        target = self._path / name
        if target.is_symlink() or not target.is_dir():
            self._try(f"delete {name}", lambda: target.unlink(missing_ok=True))
            return
        for directory, _, files in os.walk(target, topdown=False):
            for file in files:
                path = Path(directory, file)
                self._try(f"delete {file}", functools.partial(path.unlink, missing_ok=True))
            _remove_if_empty(directory)

    def _try(self, what: str, action: Callable[[], _T]) -> _T:
        return try_again(f"{what} in {self.url}", action) if self.is_remote else action()

    @contextlib.contextmanager
    def _temporary(self, name: str, data: bytes) -> Iterator[Path]:
        """A synced file with this content beside the one named; gone afterwards, whatever happens."""
        target = self._path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    """Make names in a directory survive a power cut. Mounts that can't (EINVAL) have no such state of their own."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_if_empty(directory: str) -> None:
    """Remove a directory; one that somebody has written into meanwhile stays.

    So does one on a mount of an object store, where directories are only names of files and vanish as they like.
    """
    try:
        os.rmdir(directory)  # noqa: PTH106 - what os.walk gave
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
            raise


def _file_system(path: Path) -> str:
    """Kind of the file system that a path is or will be on (``"ext4"``, ``"fuse.rclone"``); empty if unknown."""
    resolved = path.resolve()
    mounts = [(mount.mountpoint, mount.fstype) for mount in psutil.disk_partitions(all=True)]
    return max(((len(at), kind) for at, kind in mounts if resolved.is_relative_to(at)), default=(0, ""))[1]
