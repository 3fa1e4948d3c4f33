"""What a committed checkpoint consists of: its files by name, size and digest, and the manifest. Torch-free."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from air_nb.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError

__all__ = [
    "COMMIT_FILE",
    "FORMAT_VERSION",
    "MANIFEST_FILE",
    "METADATA_FILE",
    "WRITER_FILE",
    "Digest",
    "FileRecord",
    "Manifest",
    "default_algorithm",
    "record_of",
    "versions",
]

FORMAT_VERSION = 1
"""Raised when an older air_nb could misread what a newer one writes; a new field alone does not raise it."""

METADATA_FILE = ".metadata"
"""Torch's own description of the checkpoint."""
MANIFEST_FILE = "manifest.json"
COMMIT_FILE = "COMMIT"
"""The last file of a checkpoint: it holds the record of the manifest, the manifest those of all other files."""
WRITER_FILE = "writer.json"
"""Which process is writing the checkpoint: the first file of a directory, of no meaning once COMMIT is there."""


class _Hasher(Protocol):
    def update(self, data: Any, /) -> object: ...
    def hexdigest(self) -> str: ...


class _Crc32:
    """``zlib.crc32`` with hashlib's interface."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def default_algorithm() -> str:
    """``"xxh3_128"`` (15 GiB/s and core) if xxhash is installed, else ``"crc32"`` (3 GiB/s and core)."""
    try:
        import xxhash  # noqa: F401 - only asked whether it is there
    except ImportError:
        return "crc32"
    return "xxh3_128"


def _hasher(algorithm: str) -> _Hasher:
    if algorithm == "crc32":
        return _Crc32()
    if algorithm != "xxh3_128":
        msg = f"digest algorithm {algorithm!r} is not known to this air_nb: a newer one wrote this; update air_nb"
        raise CheckpointMismatchError(msg)
    try:
        import xxhash
    except ImportError as error:
        msg = "the checkpoint's digests are xxh3_128, which can't be computed here: pip install xxhash"
        raise CheckpointError(msg) from error
    return xxhash.xxh3_128()


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and digest of one file.

    Attributes:
        size_bytes: Its size.
        algorithm: ``"xxh3_128"`` or ``"crc32"``.
        digest: Hexadecimal.
    """

    size_bytes: int
    algorithm: str
    digest: str


class Digest:
    """Hash of a file that goes by in pieces.

    Args:
        algorithm: That of the record to compare with; by default the best one there is.

    Raises:
        CheckpointMismatchError: The algorithm is unknown.
        CheckpointError: It needs a package that is not installed.
    """

    def __init__(self, algorithm: str | None = None) -> None:
        self._algorithm = algorithm or default_algorithm()
        self._hasher = _hasher(self._algorithm)
        self._size_bytes = 0

    def update(self, data: Any) -> None:
        """Take the next piece (anything with the buffer protocol)."""
        self._hasher.update(data)
        self._size_bytes += memoryview(data).nbytes

    def record(self) -> FileRecord:
        """Size and digest of what has gone by."""
        return FileRecord(self._size_bytes, self._algorithm, self._hasher.hexdigest())


def record_of(data: bytes, algorithm: str | None = None) -> FileRecord:
    """Size and digest of a whole file's bytes."""
    digest = Digest(algorithm)
    digest.update(data)
    return digest.record()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one checkpoint is.

    Attributes:
        step: Number of steps completed; None if whoever saved it did not say.
        created_at: UTC seconds since the epoch.
        world_size: Number of ranks that wrote it.
        files: Every file but the manifest and COMMIT, by its name in the directory.
        versions: Of python, torch and air_nb.
        data: State of the data loader, independent of the number of ranks (JSON); None without one.
        run_id: Run of air_nb that wrote it, if any; so the next two.
        run_name: The run's name.
        mlflow_run_id: The run's id in MLflow.
        extra: Whatever else the writer wants to find again (JSON).
        format_version: See ``FORMAT_VERSION``.
    """

    step: int | None
    created_at: float
    world_size: int
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str] = field(default_factory=dict)
    data: Any = None
    run_id: str | None = None
    run_name: str | None = None
    mlflow_run_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def size_bytes(self) -> int:
        """Sum over the files."""
        return sum(record.size_bytes for record in self.files.values())

    def encode(self) -> bytes:
        """The manifest as a file.

        Raises:
            TypeError: ``data`` or ``extra`` holds what JSON has no word for.
        """
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """Read a manifest back.

        Raises:
            CheckpointMismatchError: A newer air_nb wrote it.
            CheckpointDamagedError: It is no manifest.
        """
        try:
            values = json.loads(content)
            version = int(values["format_version"])
        except (ValueError, TypeError, KeyError) as error:
            msg = f"{MANIFEST_FILE} ({len(content)} bytes) is not what air_nb writes: {error!r}"
            raise CheckpointDamagedError(msg) from error
        if version > FORMAT_VERSION:
            msg = (
                f"{MANIFEST_FILE} has format version {version}, this air_nb reads up to {FORMAT_VERSION}: "
                "a newer air_nb wrote the checkpoint; update air_nb to use it"
            )
            raise CheckpointMismatchError(msg)
        try:
            files = {name: FileRecord(**record) for name, record in values.pop("files").items()}
            known = {entry.name for entry in fields(cls)}
            return cls(files=files, **{name: value for name, value in values.items() if name in known})
        except (TypeError, KeyError, AttributeError) as error:
            msg = f"{MANIFEST_FILE} ({len(content)} bytes) lacks what air_nb writes: {error!r}"
            raise CheckpointDamagedError(msg) from error


def versions() -> dict[str, str]:
    """Versions of what wrote a checkpoint, as far as they are installed as distributions."""
    found = {"python": platform.python_version()}
    for name in ("air_nb", "numpy", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
