"""What the output and the record of a run say in one line (pure, but for the end of a log)."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

from air_nb.runs.directory import RunDirectory, RunRecord

__all__ = ["DIED", "ending_text", "last_line", "last_shown_line", "one_line", "reason_line"]

DIED = "its kernel and launcher died before it ended"
"""Reason of a run that nobody could record the end of."""

_TAIL_BYTES = 4096
_LINE_MAX = 200
# CSI sequences (colours, cursor), OSC sequences (links, titles), and the rest of two characters.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")


def reason_line(record: RunRecord) -> str:
    """Why a run ended as it did; empty if there is nothing to say."""
    if not record.state.is_final and not record.is_live:
        return DIED
    if record.failures:
        first = record.failures[0]
        what = ": ".join(str(part) for part in (first.get("type_name"), first.get("message")) if part)
        return one_line(f"rank {first.get('rank')}: {what.partition(chr(10))[0]}")
    lines = record.reason.strip().splitlines()  # of a traceback, the last one names the error
    return one_line(lines[-1]) if lines else ""


def ending_text(record: RunRecord, rank: int) -> str:
    """What a rank's log does not have: how the run failed or was stopped; empty if it ended well.

    A rank that did not fail itself gets the cause.
    """
    own = [failure for failure in record.failures if failure.get("rank") == rank]
    for failure in own or record.failures[:1]:
        text = str(failure.get("traceback") or failure.get("message") or "")
        hint = f"\nhint: {failure['hint']}" if failure.get("hint") else ""
        return f"{record.state}: rank {failure.get('rank')} of {record.nproc} failed\n{text.rstrip()}{hint}\n"
    reason = record.reason.strip() if record.state.is_final else DIED
    return f"{record.state}: {reason}\n" if reason else ""


def last_line(directory: RunDirectory, rank: int) -> str:
    """The last line that a rank has written, to whichever stream it wrote last; read from the ends of the files."""
    ends = [_end_of(directory.rank_file(rank, suffix)) for suffix in ("out", "err")]
    for _, data in sorted(ends, key=lambda end: end[0], reverse=True):
        if line := last_shown_line(data.decode(errors="replace")):
            return line
    return ""


def _end_of(path: Path) -> tuple[int, bytes]:
    """When the file has changed, and its end."""
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            return status.st_mtime_ns, os.pread(file.fileno(), _TAIL_BYTES, max(0, status.st_size - _TAIL_BYTES))
    except OSError:  # no rank was started yet, or the run is moving home
        return 0, b""


def last_shown_line(text: str) -> str:
    """The last line that is not blank; of a progress bar, which overwrites itself, the last state."""
    for line in reversed(text.split("\n")):
        for state in reversed(line.split("\r")):
            if shown := one_line(state):
                return shown
    return ""


def one_line(text: str) -> str:
    """Text for a table: no control characters, no escape sequences, at most 200 characters."""
    plain = _ESCAPES.sub("", text).replace("\t", " ").replace("\n", " ")
    shown = "".join(character for character in plain if unicodedata.category(character) not in {"Cc", "Cf"}).strip()
    return shown if len(shown) <= _LINE_MAX else f"{shown[: _LINE_MAX - 1]}…"
