"""What a run says in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from air_nb.protocol.messages import RunState
from air_nb.runs.directory import RunDirectory, RunRecord
from air_nb.runs.liveness import ProcessId
from air_nb.runs.text import DIED, ending_text, last_line, last_shown_line, one_line, reason_line


def _record(**fields: object) -> RunRecord:
    values = {"run_id": "1", "name": "x", "state": RunState.FAILED, "created_at": 1.5, "nproc": 2, "device": "cpu"}
    return RunRecord(**(values | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text, line",
    [
        ("", ""),
        ("one\ntwo\n", "two"),
        ("one\ntwo\n\n  \n", "two"),
        ("\r 10%\r 20%\r 30%", "30%"),
        ("\r 10%\r100%\n", "100%"),
        ("\r100%\r", "100%"),
        ("\x1b[31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07\n", "red link"),
        ("outer: 1\n\x1b[Ainner: 2\x1b[K\n\x1b[A", "inner: 2"),
        ("a\tb\x00\x07\x85\N{RIGHT-TO-LEFT OVERRIDE}c", "a bc"),
    ],
)
def test_the_last_line_is_what_a_terminal_shows_last(text: str, line: str):
    assert last_shown_line(text) == line


def test_a_line_has_200_characters_at_most():
    assert one_line("x" * 200) == "x" * 200
    assert one_line("x" * 201) == "x" * 199 + "…"


def test_the_last_line_is_of_the_stream_that_was_written_last(tmp_path: Path):
    directory = RunDirectory(tmp_path)
    assert last_line(directory, 0) == ""
    for number, (suffix, text) in enumerate([("out", "step 1\n" * 9_999 + "loss 0.5\n"), ("err", "\r 50%")], 1):
        directory.rank_file(0, suffix).write_text(text)
        os.utime(directory.rank_file(0, suffix), (number, number))
    assert last_line(directory, 0) == "50%"
    os.utime(directory.rank_file(0, "out"), (3, 3))
    assert last_line(directory, 0) == "loss 0.5"
    directory.rank_file(0, "out").write_text("\n")
    os.utime(directory.rank_file(0, "out"), (4, 4))
    assert last_line(directory, 0) == "50%"


def test_a_failure_is_the_reason_and_the_last_line_of_a_traceback_is_one():
    failure = {"rank": 1, "type_name": "ValueError", "message": "no\nmore", "traceback": "Trace\nValueError: no"}
    assert reason_line(_record(failures=[failure])) == "rank 1: ValueError: no"
    assert reason_line(_record(failures=[{"rank": 0, "message": "died of SIGSEGV"}])) == "rank 0: died of SIGSEGV"
    assert reason_line(_record(reason="Traceback:\n  x\nOSError: disk\n")) == "OSError: disk"
    assert reason_line(_record(reason="\n")) == ""
    assert reason_line(_record(state=RunState.RUNNING)) == DIED
    assert reason_line(_record(state=RunState.RUNNING, kernel=ProcessId.own())) == ""


def test_a_log_ends_with_the_failure_of_its_rank_else_with_the_cause():
    failures = [
        {"rank": 1, "message": "no", "traceback": "Trace of 1", "hint": "try again"},
        {"rank": 2, "message": "peer lost", "traceback": "Trace of 2"},
    ]
    record = _record(failures=failures, nproc=3)
    assert ending_text(record, 0) == "FAILED: rank 1 of 3 failed\nTrace of 1\nhint: try again\n"
    assert ending_text(record, 2) == "FAILED: rank 2 of 3 failed\nTrace of 2\n"
    assert ending_text(_record(state=RunState.KILLED, reason="%air stop"), 0) == "KILLED: %air stop\n"
    assert ending_text(_record(state=RunState.FINISHED), 0) == ""
