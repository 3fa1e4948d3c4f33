"""A rank's output in pieces, for a reader that comes back later: both streams in one order, addressed by one number.

The order is that of ``air_nb.runs.logs``; the number is how many bytes of ``rank_<r>.out`` and ``.err`` together come
before. Nothing is kept open between two pieces. What only the sizes of both files tell, how many of these bytes are of
which file, is in a ``Position``; ``seek`` finds it for a number alone.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from air_nb.runs.directory import RunDirectory

__all__ = ["CHUNK_BYTES", "Position", "read_chunk", "read_end", "seek"]

CHUNK_BYTES = 1 << 16

_EVENTS_TAIL_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 16

_Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True)
class Position:
    """How far a rank's output has been read.

    Attributes:
        out: Bytes of ``rank_<r>.out``.
        err: Bytes of ``rank_<r>.err``.
        events: Bytes of ``rank_<r>.events``, whole lines, that lie before.
        current: Python's current stream here.
    """

    out: int = 0
    err: int = 0
    events: int = 0
    current: _Stream = "stdout"

    @property
    def offset(self) -> int:
        """The number that stands for it."""
        return self.out + self.err


@dataclass(frozen=True, slots=True)
class _Mark:
    """An event: at these sizes the current stream changed, if ``stream`` says so."""

    out: int
    err: int
    stream: _Stream | None
    after: int  # offset in the events file behind this line


class _Streams:
    """The two text files of a rank, open for one piece; sizes as of the beginning."""

    def __init__(self, directory: RunDirectory, rank: int) -> None:
        self._files: dict[_Stream, FileIO | None] = {
            "stdout": _open(directory.rank_file(rank, "out")),
            "stderr": _open(directory.rank_file(rank, "err")),
        }
        self.out_bytes = self._size("stdout")
        self.err_bytes = self._size("stderr")

    def _size(self, stream: _Stream) -> int:
        file = self._files[stream]
        return os.fstat(file.fileno()).st_size if file is not None else 0

    def read(self, stream: _Stream, start: int, count: int) -> bytes:
        file = self._files[stream]
        return os.pread(file.fileno(), count, start) if file is not None and count > 0 else b""

    def close(self) -> None:
        for file in self._files.values():
            if file is not None:
                file.close()


class _Chunk:
    """A piece in the making."""

    def __init__(self, streams: _Streams, position: Position, limit_bytes: int) -> None:
        self._streams = streams
        self._left_bytes = limit_bytes
        self.position = position
        self.texts: list[str] = []
        self.is_full = False

    def advance(self, out_end: int, err_end: int, *, final: bool = False) -> None:
        """Read up to these sizes, the current stream first, as far as there is room."""
        first: tuple[_Stream, ...] = ("stdout", "stderr")
        for stream in first if self.position.current == "stdout" else reversed(first):
            if not self.is_full:
                self._read(stream, out_end if stream == "stdout" else err_end, final=final)

    def _read(self, stream: _Stream, end: int, *, final: bool) -> None:
        start = self.position.out if stream == "stdout" else self.position.err
        wanted = max(0, end - start)
        data = self._streams.read(stream, start, min(wanted, self._left_bytes))
        is_cut = len(data) < wanted
        # Half a character at the end stays for the next piece: the rank is just writing it, or there is no room.
        text, used = _decode(data, final=final and not is_cut)
        self.is_full = is_cut
        self._left_bytes -= used
        self.texts.append(text)
        if stream == "stdout":
            self.position = replace(self.position, out=start + used)
        else:
            self.position = replace(self.position, err=start + used)


def read_chunk(
    directory: RunDirectory, rank: int, start: Position, *, final: bool, limit_bytes: int = CHUNK_BYTES
) -> tuple[str, Position, bool]:
    """Read the next piece.

    Args:
        directory: The run.
        rank: Global rank.
        start: Where the last piece ended.
        final: The rank is gone: half a character at the end is shown as U+FFFD.
        limit_bytes: Most bytes of the files.

    Returns:
        The text, where it ends, and whether that is the end of the files.
    """
    streams = _Streams(directory, rank)  # before the events: whatever changes before these sizes is then in them
    try:
        chunk = _Chunk(streams, start, limit_bytes)
        out_end, err_end = streams.out_bytes, streams.err_bytes
        for mark in _marks(directory.rank_file(rank, "events"), start.events):
            if mark.out > streams.out_bytes or mark.err > streams.err_bytes:
                if not final:  # else the disk was full: the text that it stands behind was never written
                    out_end, err_end = min(out_end, mark.out), min(err_end, mark.err)
                break
            chunk.advance(mark.out, mark.err)
            if chunk.is_full:
                return "".join(chunk.texts), chunk.position, False
            current = mark.stream or chunk.position.current
            chunk.position = replace(chunk.position, events=mark.after, current=current)
        chunk.advance(out_end, err_end, final=final)
        at_end = not chunk.is_full and chunk.position.offset >= streams.out_bytes + streams.err_bytes
        return "".join(chunk.texts), chunk.position, at_end
    finally:
        streams.close()


def read_end(directory: RunDirectory, rank: int, *, final: bool) -> tuple[str, int, Position, bool]:
    """Read the last 64 KiB, from the beginning of a line on.

    Returns:
        The text, the offset that it begins at, where it ends, and whether that is the end of the files.
    """
    total = sum(_size(directory.rank_file(rank, suffix)) for suffix in ("out", "err"))
    begin = max(0, total - CHUNK_BYTES)
    text, position, at_end = read_chunk(directory, rank, seek(directory, rank, begin), final=final)
    if begin:
        cut = text.find("\n" if "\n" in text[:-1] else "\r", 0, -1) + 1
        begin += len(text[:cut].encode())
        text = text[cut:].lstrip("\N{REPLACEMENT CHARACTER}")  # a character that began before
    return text, begin, position, at_end


def seek(directory: RunDirectory, rank: int, offset: int) -> Position:
    """Find the position with this offset.

    Bytes that no Python stream wrote may be counted for the other file than they were when this offset was given out;
    whoever has the ``Position`` itself uses that.
    """
    path = directory.rank_file(rank, "events")
    tail = max(0, _size(path) - _EVENTS_TAIL_BYTES)
    found = _seek_from(path, tail, offset)
    if found is None:
        found = _seek_from(path, 0, offset) or _Found(Position(), None)
    before, after = found.before, found.after
    streams = _Streams(directory, rank)
    streams.close()
    out_end, err_end = (streams.out_bytes, streams.err_bytes) if after is None else (after.out, after.err)
    left = max(0, offset - before.offset)
    if before.current == "stdout":
        out = min(before.out + left, out_end)
        return replace(before, out=out, err=min(before.err + left - (out - before.out), err_end))
    err = min(before.err + left, err_end)
    return replace(before, err=err, out=min(before.out + left - (err - before.err), out_end))


@dataclass(frozen=True, slots=True)
class _Found:
    """The last mark that does not lie behind an offset, as a position, and the one after it."""

    before: Position
    after: _Mark | None


def _seek_from(path: Path, begin: int, offset: int) -> _Found | None:
    """None if everything from there on lies behind the offset."""
    before = Position() if begin == 0 else None
    current: _Stream = "stdout"
    for mark in _marks(path, begin, whole_lines=begin == 0):
        if mark.out + mark.err > offset:
            return _Found(before, mark) if before is not None else None
        current = mark.stream or current
        before = Position(mark.out, mark.err, mark.after, current)
    return _Found(before, None) if before is not None else None


def _marks(path: Path, begin: int, *, whole_lines: bool = True) -> Iterator[_Mark]:
    """The events from there on, without a last line that is being written."""
    file = _open(path)
    if file is None:
        return
    with file:
        file.seek(begin)
        buffer, position, is_first = b"", begin, not whole_lines
        while data := file.read(_BLOCK_BYTES):
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                position += len(line) + 1
                if is_first:  # the rest of a line
                    is_first = False
                elif (mark := _parse(line, position)) is not None:
                    yield mark


def _parse(line: bytes, after: int) -> _Mark | None:
    try:
        values: dict[str, Any] = json.loads(line)
        stream: _Stream | None = None
        if "s" in values:
            stream = "stderr" if values["s"] == "stderr" else "stdout"
        return _Mark(int(values["o"]), int(values["e"]), stream, after)
    except (ValueError, KeyError, TypeError):
        return None  # torn by a full disk or a foreign writer


def _decode(data: bytes, *, final: bool) -> tuple[str, int]:
    """Text, and how many bytes it takes: not those of a character that is not whole yet."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(data, final)
    return text, len(data) - len(decoder.getstate()[0])


def _open(path: Path) -> FileIO | None:
    try:
        return FileIO(path)
    except FileNotFoundError:  # the rank has not come that far
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
