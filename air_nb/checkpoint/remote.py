"""Stores behind URLs: S3 through obstore where it is installed, everything else through fsspec. Torch-free.

A store keeps its connection for the process that made it; a forked or unpickled one makes its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from air_nb.checkpoint.store import BLOCK_BYTES, Store, StoredFile, try_again
from air_nb.errors import CheckpointError

if TYPE_CHECKING:
    import obstore.store

__all__ = ["FsspecStore", "S3Store", "open_remote"]

_T = TypeVar("_T")
_MAX_PARTS = 9_000  # S3 allows 10,000 parts in an upload
_MIN_PART_BYTES = 16 * 2**20
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")  # fsspec leaves it to each kind


def open_remote(url: str) -> Store:
    """The store of a URL.

    Raises:
        CheckpointError: No installed package knows its kind.
    """
    return S3Store(url) if url.startswith(("s3://", "s3a://")) and _prefer_obstore() else FsspecStore(url)


def _prefer_obstore() -> bool:
    """Whether S3 goes through obstore: if it is there, and will find the credentials, or s3fs is not there.

    It knows the environment and the machine's own role; profiles and the like in ``~/.aws`` only s3fs knows.
    """
    if importlib.util.find_spec("obstore") is None:
        return False
    return "AWS_ACCESS_KEY_ID" in os.environ or importlib.util.find_spec("s3fs") is None


class _RemoteStore(Store):
    """What both kinds share: a connection for each process, and names below a root."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._connected: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connected": None}

    def _connection(self) -> Any:
        if self._connected is None or self._connected[0] != os.getpid():
            self._connected = os.getpid(), self._connect()
        return self._connected[1]

    @abstractmethod
    def _connect(self) -> Any:
        """Make a connection for this process."""

    def child(self, name: str) -> Store:
        """The store below this one."""
        return type(self)(f"{self.url}/{name}")

    def _must_be_absent(self, name: str) -> None:
        if self.exists(name):
            msg = f"{self.url}/{name} is there already"
            raise FileExistsError(msg)

    def _create_by_looking(self, name: str, data: bytes) -> None:
        """Create where the storage can't do so exclusively: look, write, and look who has won.

        Of two that do it in the same instant one is told; both believe to have won only if the slower one's write
        arrives after the faster one has looked. Names of checkpoints are random, so nobody competes for them.
        """
        self._must_be_absent(name)
        self.write(name, data)
        if self.read(name) != data:
            msg = f"{self.url}/{name} was created by somebody else in the same instant"
            raise FileExistsError(msg)


class S3Store(_RemoteStore):
    """A prefix of a bucket, through obstore, which has its own retries.

    Settings come from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``, …).
    """

    def _connect(self) -> obstore.store.S3Store:
        from obstore.store import S3Store as Connection

        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        plain: Any = {"allow_http": True} if endpoint.startswith("http://") else {}
        return Connection.from_url(self.url.replace("s3a://", "s3://", 1), client_options=plain)

    def read(self, name: str) -> bytes:
        """The content of a file."""
        import obstore

        return bytes(self._try(name, lambda: obstore.get(self._connection(), name).bytes()))

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``start`` on."""
        import obstore

        wanted = min(length, self.size(name) - start)
        if wanted <= 0:
            return b""
        return bytes(self._try(name, lambda: obstore.get_range(self._connection(), name, start=start, length=wanted)))

    def blocks(self, name: str) -> Iterator[bytes]:
        """The content of a file in pieces."""
        import obstore

        stream = iter(self._try(name, lambda: obstore.get(self._connection(), name).stream(min_chunk_size=BLOCK_BYTES)))
        while (block := self._try(name, lambda: next(stream, None))) is not None:
            yield bytes(block)

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file."""
        import obstore

        self._try(name, lambda: obstore.put(self._connection(), name, data))

    def upload(self, name: str, local_path: Path) -> None:
        """Copy a whole local file here, in parts."""
        import obstore

        part = max(_MIN_PART_BYTES, local_path.stat().st_size // _MAX_PARTS)
        self._try(name, lambda: obstore.put(self._connection(), name, local_path, chunk_size=part, max_concurrency=4))

    def create(self, name: str, data: bytes) -> None:
        """Write a file only if there is none of that name (``If-None-Match``)."""
        import obstore
        from obstore.exceptions import NotSupportedError

        try:
            self._try(name, lambda: obstore.put(self._connection(), name, data, mode="create"))
        except (NotSupportedError, NotImplementedError):
            self._create_by_looking(name, data)

    def size(self, name: str) -> int:
        """Size of a file in bytes."""
        import obstore

        return self._try(name, lambda: obstore.head(self._connection(), name))["size"]

    def list(self, directory: str = "") -> dict[str, StoredFile]:
        """The files directly in a directory."""
        return {
            str(entry["path"]).rpartition("/")[2]: StoredFile(entry["size"], entry["last_modified"].timestamp())
            for entry in self._listing(directory)["objects"]
            if str(entry["path"]).strip("/") != directory.strip("/")  # a marker of the directory itself
        }

    def directories(self, directory: str = "") -> tuple[str, ...]:
        """Names of the directories directly in a directory."""
        found = (str(prefix).rstrip("/").rpartition("/")[2] for prefix in self._listing(directory)["common_prefixes"])
        return tuple(sorted(found))

    def _listing(self, directory: str) -> Any:
        import obstore

        return self._try(directory, lambda: obstore.list_with_delimiter(self._connection(), directory or None))

    def delete(self, name: str = "") -> None:
        """Delete a file, or all below a directory."""
        import obstore

        below = [entry["path"] for page in obstore.list(self._connection(), name or None) for entry in page]
        if doomed := [*below, *([name] if name else [])]:
            with contextlib.suppress(FileNotFoundError):
                self._try(name, lambda: obstore.delete(self._connection(), doomed))

    def _try(self, name: str, action: Callable[[], _T]) -> _T:
        from obstore import exceptions

        try:
            return action()
        except exceptions.AlreadyExistsError as error:
            msg = f"{self.url}/{name} is there already"
            raise FileExistsError(msg) from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            msg = f"{self.url}/{name}: not allowed: {error}"
            raise PermissionError(msg) from error
        except exceptions.NotSupportedError:
            raise
        except exceptions.BaseError as error:
            # Behind that it prints its own structures, a screenful.
            msg = f"{self.url}/{name}: {str(error).partition('Debug source:')[0].strip()}"
            raise OSError(msg) from error


class FsspecStore(_RemoteStore):
    """A directory of any kind of storage that fsspec knows.

    Raises:
        CheckpointError: It does not know this kind, or a package for it is missing.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        import fsspec

        try:
            fsspec.get_filesystem_class(url.partition("://")[0])
        except (ValueError, ImportError) as error:
            hint = " or obstore" if url.startswith("s3") else ""
            msg = f"{url} can't be opened: {error}. Install the fsspec package for it{hint}, or give a directory"
            raise CheckpointError(msg) from error

    def _connect(self) -> tuple[Any, str]:
        import fsspec.core

        # Others write here, too: a listing must not be remembered.
        system, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        return system, root

    def _at(self, name: str) -> str:
        root = self._connection()[1].rstrip("/")
        return f"{root}/{name}" if name else root

    @property
    def _fs(self) -> Any:
        return self._connection()[0]

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return self._try(name, lambda: bytes(self._fs.cat_file(self._at(name))))

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``start`` on."""

        def read() -> bytes:
            with self._fs.open(self._at(name), "rb") as file:
                file.seek(start)
                return bytes(file.read(length))

        return self._try(name, read)

    def blocks(self, name: str) -> Iterator[bytes]:
        """The content of a file in pieces."""
        with self._try(name, lambda: self._fs.open(self._at(name), "rb")) as file:
            while block := self._try(name, lambda: file.read(BLOCK_BYTES)):
                yield bytes(block)

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file."""
        self._try(name, lambda: self._put(name, lambda at: self._fs.pipe_file(at, data)))

    def upload(self, name: str, local_path: Path) -> None:
        """Copy a whole local file here."""
        self._try(name, lambda: self._put(name, lambda at: self._fs.put_file(str(local_path), at)))

    def create(self, name: str, data: bytes) -> None:
        """Write a file only if there is none of that name: exclusively, where fsspec can do so there."""
        self._must_be_absent(name)
        try:
            self._put(name, lambda at: self._fs.pipe_file(at, data, mode="create"))
        except (TypeError, ValueError, NotImplementedError):  # this kind takes no mode
            self._create_by_looking(name, data)
        except OSError:  # some say so in their own words
            self._must_be_absent(name)
            raise
        if self.read(name) != data:
            msg = f"{self.url}/{name} was created by somebody else in the same instant"
            raise FileExistsError(msg)

    def _put(self, name: str, put: Callable[[str], object]) -> None:
        try:
            put(self._at(name))
        except FileNotFoundError:  # real directories have to be made first
            self._fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
            put(self._at(name))

    def size(self, name: str) -> int:
        """Size of a file in bytes."""
        return int(self._try(name, lambda: self._fs.info(self._at(name)))["size"])

    def list(self, directory: str = "") -> dict[str, StoredFile]:
        """The files directly in a directory."""
        return {
            entry["name"].rpartition("/")[2]: StoredFile(int(entry["size"]), _modified_at(entry))
            for entry in self._listing(directory)
            if entry["type"] == "file"
        }

    def directories(self, directory: str = "") -> tuple[str, ...]:
        """Names of the directories directly in a directory."""
        entries = (entry for entry in self._listing(directory) if entry["type"] == "directory")
        return tuple(sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries))

    def _listing(self, directory: str) -> Any:
        def listing() -> Any:
            at = self._at(directory)
            try:
                found = self._fs.ls(at, detail=True)
            except FileNotFoundError:
                return []
            # Object stores list a directory's own marker, and a file as itself.
            return [entry for entry in found if entry["name"].strip("/") != at.strip("/")]

        return self._try(directory, listing)

    def delete(self, name: str = "") -> None:
        """Delete a file, or a directory with all below it."""

        def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._at(name), recursive=True)

        self._try(name, delete)

    def _try(self, name: str, action: Callable[[], _T]) -> _T:
        return try_again(f"{self.url}/{name}", action)


def _modified_at(entry: dict[str, Any]) -> float | None:
    for key in _TIMES:
        value = entry.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
