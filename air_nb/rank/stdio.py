"""File descriptors 0, 1 and 2 of a rank, and Python's streams on top of them.

fd 1 and 2 are O_APPEND files of the run directory, so that C and CUDA prints, child processes and dying words are kept
whole. Python's two streams are unbuffered and note in ``rank_<r>.events`` when the stream changes, which is what puts
prints and warnings back in order (see ``runs.logs``).
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

from air_nb.protocol.events import BEGAN

__all__ = ["EventLog", "redirect_descriptors", "replace_python_streams"]

_IOLBF = 1  # <stdio.h>: line buffered


def redirect_descriptors(directory: Path, rank: int) -> None:
    """Point fd 0 at /dev/null and fd 1 and 2 at this rank's files."""
    files = {
        0: os.open(os.devnull, os.O_RDONLY),
        1: _open_append(directory / f"rank_{rank}.out"),
        2: _open_append(directory / f"rank_{rank}.err"),
    }
    for target, opened in files.items():
        os.dup2(opened, target)
        if opened != target:
            os.close(opened)
    libc = ctypes.CDLL(None)
    # A file makes C's stdout fully buffered: lines of C code would come at the end, or never if the rank is killed.
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)


def flush_c_stdio() -> None:
    """Write out what C code has printed without a newline."""
    ctypes.CDLL(None).fflush(None)


def _open_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


class EventLog:
    """``rank_<r>.events``: stream changes and rich messages, each with the size of both text files."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._current = ""

    def use_stream(self, name: Literal["stdout", "stderr"]) -> None:
        """Note that Python writes to this stream from now on; cheap if it did already."""
        if name != self._current:
            self._current = name
            self._write({"s": name})

    def began(self) -> None:
        """Note that the rank begins with the cell or function."""
        self._write({"k": BEGAN})

    def rich(self, kind: str, **content: Any) -> None:
        """Note a rich message.

        Args:
            kind: Jupyter's message type.
            **content: ``data``, ``metadata``, ``id`` (display id), ``wait``.
        """
        self._write({"k": kind, **content})

    def _write(self, values: dict[str, Any]) -> None:
        out, err = _size(1), _size(2)
        # One write per line: loader workers append to the same file.
        os.write(self._descriptor, json.dumps({"o": out, "e": err, **values}).encode() + b"\n")


def _size(descriptor: int) -> int:
    try:
        return os.fstat(descriptor).st_size
    except OSError:  # the cell closed it; nothing can be in it from now on
        return 0


class _RankStream(io.TextIOWrapper):
    """Unbuffered text stream that notes when it becomes the current one."""

    def __init__(self, name: Literal["stdout", "stderr"], descriptor: int, events: EventLog) -> None:
        # As `python -u`: a buffer between would cost a third more per line.
        raw = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        self._stream_name = name
        self._events = events

    @property
    def name(self) -> str:
        """As of ``sys.stdout``."""
        return f"<{self._stream_name}>"

    def write(self, text: str, /) -> int:
        self._events.use_stream(self._stream_name)
        return super().write(text)


def replace_python_streams(events: EventLog) -> None:
    """Make ``sys.stdin``, ``sys.stdout`` and ``sys.stderr`` those of this rank."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the rank
    sys.stdout = _RankStream("stdout", 1, events)
    sys.stderr = _RankStream("stderr", 2, events)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
