"""One pickle stream and its out-of-band buffers, in memory or in a file.

A payload goes from the kernel to the ranks, and a result from a rank to the kernel, as one such file: the writer copies
each array once, into the file, and readers map it. The layout, all numbers little-endian::

    magic        16 bytes
    header size  8 bytes
    header       JSON: {"version": 1, "stream_bytes": n, "buffer_bytes": [n, ...]}
    stream       the pickle, at the next multiple of 64
    buffers      each at the next multiple of 64

This module knows nothing of what is pickled. It runs in the kernel and in ranks, in any thread.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from air_nb.errors import AirNbError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Bundle", "BundleError", "StreamReader"]

_MAGIC = b"air_nb bundle\r\n\0"
_VERSION = 1
_PREFIX = struct.Struct("<16sQ")
# Cache lines and the widest vector registers: torch and numpy take their fast paths on aligned data.
_ALIGNMENT_BYTES = 64
# A mapping costs a file descriptor for as long as an array lives on it (up to Python 3.12), so small files are read.
_MAPPED_FROM_BYTES = 1 << 20


class BundleError(AirNbError):
    """A file is not a whole bundle of this version."""


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """A pickle stream and the buffers that it refers to, in order.

    Attributes:
        stream: The pickle in pieces.
        buffers: Contiguous bytes. Those of an opened bundle are writable and private: a write is seen neither by the
            file nor by another reader.
    """

    stream: tuple[bytes | memoryview, ...]
    buffers: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of stream and buffers, without header and padding."""
        return sum(map(len, self.stream)) + sum(buffer.nbytes for buffer in self.buffers)

    def reader(self) -> StreamReader:
        """The stream as a file that an unpickler reads."""
        return StreamReader(self.stream)

    def write(self, path: Path) -> None:
        """Write the bundle to a file of mode 0600 that appears whole or not at all.

        There is no fsync: the file lives as long as its run and is read on this machine only, through the page cache,
        so it need not survive a power cut, and waiting for the disk would double the cost of a result.

        Raises:
            OSError: It could not be written (a full disk, mostly); nothing is left behind.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                self._write_to(file)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _write_to(self, file: BinaryIO) -> None:
        stream_bytes = sum(map(len, self.stream))
        sizes = [buffer.nbytes for buffer in self.buffers]
        header = json.dumps({"version": _VERSION, "stream_bytes": stream_bytes, "buffer_bytes": sizes}).encode()
        file.write(_PREFIX.pack(_MAGIC, len(header)))
        file.write(header)
        file.write(_padding(_PREFIX.size + len(header)))
        file.writelines(self.stream)
        end = stream_bytes
        for buffer in self.buffers:
            # Buffered files hand large writes to the system without a copy, so this never holds the data twice.
            file.write(_padding(end))
            file.write(buffer)
            end = buffer.nbytes

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Map a file that ``write`` made; the bundle stays good when the file is unlinked.

        Raises:
            BundleError: The file is cut short, is not ours or is of another version.
            OSError: It can't be opened.
        """
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            memory = memoryview(_map(file, size)) if size else memoryview(b"")
        return cls._parse(memory, path)

    @classmethod
    def _parse(cls, memory: memoryview, path: Path) -> Bundle:
        found = bytes(memory[: len(_MAGIC)])
        if found != _MAGIC:
            cut = "it is empty" if not found else f"it begins with {found!r}"
            message = f"{path} is no air_nb bundle: {cut}. Its writer may have been killed; run the cell again."
            raise BundleError(message)
        if len(memory) < _PREFIX.size:
            raise _cut_short(path, len(memory), _PREFIX.size)
        _, header_size = _PREFIX.unpack_from(memory)
        start = _PREFIX.size + header_size
        if len(memory) < start:
            raise _cut_short(path, len(memory), start)
        header = json.loads(bytes(memory[_PREFIX.size : start]))
        if header["version"] != _VERSION:
            message = f"{path} has bundle format {header['version']}, this air_nb reads {_VERSION}: restart the kernel."
            raise BundleError(message)
        *regions, end = _regions(start, [header["stream_bytes"], *header["buffer_bytes"]])
        if len(memory) != end[1]:
            raise _cut_short(path, len(memory), end[1])
        stream, *buffers = (memory[first:last] for first, last in regions)
        return cls((stream,), tuple(buffers))


class StreamReader:
    """The part of a binary file that an unpickler needs, over pieces of memory: reads copy only what is asked for."""

    def __init__(self, pieces: tuple[bytes | memoryview, ...]) -> None:
        self._view = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        self._position = 0

    @property
    def at_end(self) -> bool:
        """Whether everything has been read."""
        return self._position >= len(self._view)

    def read(self, size: int = -1, /) -> bytes:
        """Read up to ``size`` bytes, all that is left if negative."""
        stop = len(self._view) if size < 0 else min(self._position + size, len(self._view))
        piece = bytes(self._view[self._position : stop])
        self._position = stop
        return piece

    def readinto(self, target: memoryview, /) -> int:
        """Fill ``target`` as far as there are bytes."""
        piece = self._view[self._position : self._position + len(target)]
        target[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def readline(self) -> bytes:
        """Read up to and with the next newline (only pickles of protocol 0 have such lines)."""
        newline = self._view[self._position :].tobytes().find(b"\n")
        return self.read(newline + 1 if newline >= 0 else -1)


def _map(file: BinaryIO, size: int) -> mmap.mmap:
    """The file's bytes, writable and private; large files stay in the page cache, shared with all who map them."""
    private = mmap.MAP_PRIVATE
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    if size < _MAPPED_FROM_BYTES:
        memory = mmap.mmap(-1, size, flags=private | mmap.MAP_ANONYMOUS, prot=writable)
        file.readinto(memory)  # type: ignore[attr-defined]  # typeshed's BinaryIO lacks it
        return memory
    if sys.version_info >= (3, 13):
        return mmap.mmap(file.fileno(), size, flags=private, prot=writable, trackfd=False)
    return mmap.mmap(file.fileno(), size, flags=private, prot=writable)


def _regions(start: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Where each region begins and ends in a file whose header ends at ``start``; last, where the file ends (twice)."""
    end = start
    for size in sizes:
        first = end + len(_padding(end))
        end = first + size
        yield first, end
    yield end, end


def _padding(position: int) -> bytes:
    return bytes(-position % _ALIGNMENT_BYTES)


def _cut_short(path: Path, size: int, expected: int) -> BundleError:
    return BundleError(
        f"{path} is damaged: it has {size} bytes where {expected} are expected. Its writer may have been killed, or "
        "the disk is full; run the cell again."
    )
