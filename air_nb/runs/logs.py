"""The three files of a rank, read back in the order in which the rank wrote them.

``rank_<r>.out`` and ``.err`` hold the bytes of fd 1 and 2, whoever wrote them. ``rank_<r>.events`` has one JSON line
for each change of Python's current stream and each rich message, with the size of both files at that moment. That is
enough to put text and figures in order without slowing the rank down.

A reader takes the sizes of both text files *first* and the events after: every change that lies before those sizes is
then in the events, so the text up to there can be ordered for good.
"""

from __future__ import annotations

import codecs
import json
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from air_nb.protocol.events import BEGAN, RankBegan, RankEvent, Rich, StreamName, Text
from air_nb.runs.directory import RunDirectory

__all__ = ["RankLogReader", "read_tail"]

_CHUNK_BYTES = 1 << 20


@dataclass(slots=True)
class _Mark:
    """An event line: at these sizes, the stream changed or a rich message came."""

    out: int
    err: int
    line: dict[str, Any]


class _GrowingFile:
    """A file that a rank appends to."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.offset = 0

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_bytes(self, end: int) -> bytes:
        data = os.pread(self._descriptor, end - self.offset, self.offset) if end > self.offset else b""
        self.offset += len(data)
        return data

    def read_text(self, end: int, *, final: bool = False) -> str:
        return self._decoder.decode(self.read_bytes(end), final)

    def skip(self, keep_bytes: int) -> int:
        """Go on ``keep_bytes`` before the end, if that is ahead; bytes left out."""
        skipped = max(0, self.size() - keep_bytes - self.offset)
        if skipped:
            self.offset += skipped
            self._decoder.reset()
        return skipped

    def close(self) -> None:
        os.close(self._descriptor)


class RankLogReader:
    """Follows the output of one rank. Not thread-safe: it belongs to the thread that waits for the run.

    Args:
        directory: Directory of the run; the files are made if the rank has not yet.
        rank: Global rank.
    """

    def __init__(self, directory: RunDirectory, rank: int) -> None:
        self.rank = rank
        self._out = _GrowingFile(directory.rank_file(rank, "out"))
        self._err = _GrowingFile(directory.rank_file(rank, "err"))
        self._events = _GrowingFile(directory.rank_file(rank, "events"))
        self._partial_line = b""
        self._marks: deque[_Mark] = deque()
        self._current: StreamName = "stdout"

    def read(self, *, final: bool = False) -> list[RankEvent]:
        """What is new, in order; about 1 MiB of text at most, so call it again while it returns something.

        Args:
            final: The rank is gone: half a character at the end is shown as U+FFFD.
        """
        out_end = min(self._out.size(), self._out.offset + _CHUNK_BYTES)
        err_end = min(self._err.size(), self._err.offset + _CHUNK_BYTES)
        self._read_marks()
        found: list[RankEvent] = []
        while self._marks and self._marks[0].out <= out_end and self._marks[0].err <= err_end:
            mark = self._marks.popleft()
            found += self._texts(mark.out, mark.err)
            found += self._apply(mark.line)
        if self._marks:
            out_end, err_end = min(out_end, self._marks[0].out), min(err_end, self._marks[0].err)
        found += self._texts(out_end, err_end)
        if final and not found:
            found += self._texts(out_end, err_end, final=True)
        return found

    def skip(self, keep_bytes: int) -> list[RankEvent]:
        """Leave out text but for the last ``keep_bytes`` of each file; a line says so if there was more."""
        skipped = self._out.skip(keep_bytes) + self._err.skip(keep_bytes)
        if not skipped:
            return []
        where = f"rank_{self.rank}.out and .err have all of it"
        return [Text(self.rank, "stdout", f"\n... {skipped >> 20:,} MiB left out, {where}\n")]

    def _read_marks(self) -> None:
        data = self._partial_line + self._events.read_bytes(self._events.size())
        *lines, self._partial_line = data.split(b"\n")
        for line in lines:
            try:
                values = json.loads(line)
                self._marks.append(_Mark(values["o"], values["e"], values))
            except (ValueError, KeyError, TypeError):
                continue  # torn by a full disk or a foreign writer: the text itself is in .out and .err

    def _texts(self, out_end: int, err_end: int, *, final: bool = False) -> list[RankEvent]:
        """Text up to these sizes; what belongs to the current stream comes first."""
        pairs: list[tuple[StreamName, str]] = []
        for stream in ("stdout", "stderr") if self._current == "stdout" else ("stderr", "stdout"):
            name: Literal["stdout", "stderr"] = "stdout" if stream == "stdout" else "stderr"
            file, end = (self._out, out_end) if name == "stdout" else (self._err, err_end)
            pairs.append((name, file.read_text(end, final=final)))
        return [Text(self.rank, name, text) for name, text in pairs if text]

    def _apply(self, line: dict[str, Any]) -> list[RankEvent]:
        if "s" in line:
            self._current = "stderr" if line["s"] == "stderr" else "stdout"
            return []
        if line["k"] == BEGAN:
            return [RankBegan(self.rank)]
        return [
            Rich(
                rank=self.rank,
                kind=line["k"],
                data=line.get("data", {}),
                metadata=line.get("metadata", {}),
                display_id=line.get("id"),
                wait=bool(line.get("wait")),
            )
        ]

    def close(self) -> None:
        """Close the files."""
        for file in (self._out, self._err, self._events):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_tail(directory: RunDirectory, rank: int, lines: int | None) -> str:
    """Text of a rank, both streams in order; the last ``lines`` lines, or all."""
    pieces: deque[str] = deque()
    with RankLogReader(directory, rank) as reader:
        while events := reader.read(final=True):
            pieces.extend(event.text for event in events if isinstance(event, Text))
    text = "".join(pieces)
    return text if lines is None else "".join(text.splitlines(keepends=True)[-lines:])
