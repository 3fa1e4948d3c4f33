"""When a line was first at the client, whatever the pieces it came in."""

from __future__ import annotations

import re

from benchmarks.harness import arrivals
from tests.support.kernel import Cell

_LINE = re.compile(r"<line of rank \d+>")


def _stream(at, text):
    return at, {"msg_type": "stream", "content": {"name": "stdout", "text": text}}


def test_line_that_comes_in_two_pieces_arrives_with_the_second():
    cell = Cell("id", [_stream(1.0, "<line of ra"), _stream(2.0, "nk 3>\n<line of rank 4>\n")])
    assert arrivals(cell, _LINE) == {"<line of rank 3>": 2.0, "<line of rank 4>": 2.0}


def test_first_arrival_counts_and_colours_do_not():
    cell = Cell("id", [_stream(1.0, "\x1b[31m<line of\x1b[0m rank 3>\n"), _stream(2.0, "<line of rank 3>\n")])
    assert arrivals(cell, _LINE) == {"<line of rank 3>": 1.0}


def test_displays_and_errors_are_shown_text_too():
    display = {"msg_type": "update_display_data", "content": {"data": {"text/plain": "<line of rank 1>"}}}
    error = {"msg_type": "error", "content": {"traceback": ["Error", "<line of rank 2>"]}}
    status = {"msg_type": "status", "content": {"execution_state": "idle"}}
    cell = Cell("id", [(1.0, display), (2.0, error), (3.0, status)])
    assert arrivals(cell, _LINE) == {"<line of rank 1>": 1.0, "<line of rank 2>": 2.0}
