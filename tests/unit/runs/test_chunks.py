"""A rank's output in pieces is, put together, what `read_tail` shows, wherever the pieces end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_nb.runs.chunks import CHUNK_BYTES, Position, read_chunk, read_end, seek
from air_nb.runs.directory import RunDirectory
from air_nb.runs.logs import read_tail


class Rank:
    """Writes as a rank does: text to two files, and a line wherever Python's stream changes."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(path)
        self._current = "stdout"

    def write(self, stream: str, data: str | bytes, *, by_python: bool = True) -> None:
        if by_python and stream != self._current:
            self._current = stream
            self.event({"s": stream})
        suffix = "out" if stream == "stdout" else "err"
        with self.directory.rank_file(0, suffix).open("ab") as file:
            file.write(data if isinstance(data, bytes) else data.encode())

    def event(self, values: dict[str, object]) -> None:
        sizes = {"o": self._size("out"), "e": self._size("err")}
        with self.directory.rank_file(0, "events").open("a") as file:
            file.write(json.dumps(sizes | values) + "\n")

    def _size(self, suffix: str) -> int:
        path = self.directory.rank_file(0, suffix)
        return path.stat().st_size if path.exists() else 0

    def read(self, position: Position, *, final: bool = True, limit_bytes: int = CHUNK_BYTES) -> tuple[str, Position]:
        """All that is there from here on."""
        texts = []
        while True:
            text, position, at_end = read_chunk(self.directory, 0, position, final=final, limit_bytes=limit_bytes)
            texts.append(text)
            if at_end or not text:
                return "".join(texts), position


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


_pieces = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.text("aé€😀\n\r", max_size=9)), max_size=20)


@settings(max_examples=60, deadline=None)
@given(pieces=_pieces, limit_bytes=st.integers(4, 40))
def test_pieces_of_any_size_make_the_whole(tmp_path_factory, pieces, limit_bytes):
    rank = Rank(tmp_path_factory.mktemp("rank"))
    for stream, text in pieces:
        rank.write(stream, text)
    whole, end = rank.read(Position(), limit_bytes=limit_bytes)
    assert whole == "".join(text for _, text in pieces)
    assert whole == read_tail(rank.directory, 0, None)
    assert end.offset == len(whole.encode())


@settings(max_examples=60, deadline=None)
@given(pieces=_pieces, data=st.data())
def test_a_position_is_found_again_by_its_number(tmp_path_factory, pieces, data):
    rank = Rank(tmp_path_factory.mktemp("rank"))
    for stream, text in pieces:
        rank.write(stream, text)
    whole = "".join(text for _, text in pieces)
    cut = data.draw(st.integers(0, len(whole)))
    position = seek(rank.directory, 0, len(whole[:cut].encode()))
    assert rank.read(position)[0] == whole[cut:]


def test_what_is_being_written_comes_with_the_next_piece(rank: Rank):
    rank.write("stdout", b"caf" + "é".encode()[:1])
    text, position = rank.read(Position(), final=False)
    assert text == "caf"
    rank.write("stdout", "é".encode()[1:] + b"!\n")
    rank.write("stderr", "warning\n")
    assert rank.read(position, final=False)[0] == "é!\nwarning\n"


def test_half_a_character_at_the_very_end_is_shown_as_one(rank: Rank):
    rank.write("stdout", b"caf\xc3")
    assert rank.read(Position(), final=True)[0] == "caf\N{REPLACEMENT CHARACTER}"


def test_c_code_that_writes_between_two_looks_is_neither_lost_nor_doubled(rank: Rank):
    rank.write("stdout", "one\n")
    rank.write("stderr", "from C\n", by_python=False)
    text, position = rank.read(Position(), final=False)
    rank.write("stdout", "two\n")
    rank.write("stderr", "more from C\n", by_python=False)
    assert text + rank.read(position)[0] == "one\nfrom C\ntwo\nmore from C\n"


def test_pythons_own_stream_comes_first_where_nothing_tells_the_order(rank: Rank):
    rank.write("stderr", "one\n")
    rank.write("stdout", "from C\n", by_python=False)
    rank.write("stderr", "two\n")
    assert rank.read(Position())[0] == "one\ntwo\nfrom C\n" == read_tail(rank.directory, 0, None)


def test_text_behind_a_change_that_was_seen_too_early_waits_for_what_comes_before(rank: Rank):
    rank.write("stdout", "one\n")
    rank.directory.rank_file(0, "events").write_text('{"o": 8, "e": 0, "s": "stderr"}\n')
    rank.write("stderr", "warning\n", by_python=False)
    text, position = rank.read(Position(), final=False)
    assert text == "one\n"
    rank.write("stdout", "two\n", by_python=False)
    assert rank.read(position, final=False)[0] == "two\nwarning\n"


def test_text_that_a_full_disk_did_not_take_is_not_waited_for_in_the_end(rank: Rank):
    rank.write("stdout", "one\n")
    rank.directory.rank_file(0, "events").write_text('{"o": 8, "e": 0, "s": "stderr"}\n')
    rank.write("stderr", "warning\n", by_python=False)
    assert rank.read(Position(), final=True)[0] == "one\nwarning\n"


def test_the_end_begins_with_a_whole_line(rank: Rank):
    for number in range(12_000):
        rank.write("stdout" if number % 100 else "stderr", f"line {number}\n")
    text, begin, position, at_end = read_end(rank.directory, 0, final=True)
    whole = "".join(f"line {number}\n" for number in range(12_000))
    assert at_end
    assert whole.endswith(text)
    assert text.startswith("line ")
    assert CHUNK_BYTES - 100 < len(text) <= CHUNK_BYTES
    assert (begin, position.offset) == (len(whole) - len(text), len(whole))


def test_the_end_of_one_long_line_is_not_empty(rank: Rank):
    rank.write("stdout", "€" * 50_000 + "\n")
    text, *_ = read_end(rank.directory, 0, final=True)
    assert set(text) == {"€", "\n"}
    assert len(text) > 20_000


def test_the_end_of_a_progress_bar_begins_with_a_whole_state(rank: Rank):
    for number in range(9_000):
        rank.write("stderr", f"\r{number:5} of 9000")
    assert read_end(rank.directory, 0, final=True)[0].startswith(" ")


def test_a_rank_that_has_not_begun_has_nothing(rank: Rank):
    assert read_end(rank.directory, 0, final=False) == ("", 0, Position(), True)


@pytest.mark.parametrize("line", ['{"o": 1, "e"', "[]", '{"o": null, "e": 0}', '{"o": 99, "e": 99, "s": "stderr"}'])
def test_a_torn_event_hides_no_text(rank: Rank, line: str):
    rank.write("stdout", "one\n")
    with rank.directory.rank_file(0, "events").open("a") as file:
        file.write(line + "\n")
    rank.write("stdout", "two\n")
    assert rank.read(Position())[0] == "one\ntwo\n"
