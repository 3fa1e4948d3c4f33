from __future__ import annotations

import io
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from air_nb.view.screen import LINE_MAX, LineBuffer


def feed(*chunks: str, close=True) -> list[str]:
    buffer = LineBuffer()
    lines = [line for chunk in chunks for line in buffer.add(buffer.prepare(chunk), 0.0)]
    return lines + (buffer.close() if close else [])


def cut(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(position % (len(text) + 1) for position in at), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize(
    "text, lines",
    [
        ("a\nb\n", ["a", "b"]),
        ("a\n\nb", ["a", "", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("a\r\r\nb\n", ["a", "b"]),
        ("\r 0%\r 50%\r100%\n", ["100%"]),
        ("long text\rabc\n", ["abcg text"]),
        ("long text\r\x1b[Kabc\n", ["abc"]),
        ("long text\x1b[2K\rabc\n", ["abc"]),
        ("1%\x08\x08" + "2%\n", ["2%"]),
        ("\r bar\r    \r", []),
        ("\rbar\nplain\n", ["bar", "plain"]),
        ("\x1b[31mred\x1b[0m\n", ["\x1b[31mred\x1b[0m"]),
        ("\r\x1b[32m 10%\x1b[0m\r\x1b[32m100%\x1b[0m\n", ["\x1b[32m100%\x1b[0m"]),
        ("nul\x00byte\n", ["nul␀byte"]),
        ("\x1b[?25lhidden cursor\x1b[?25h\n", ["hidden cursor"]),
        ("\x1b[5Cindented\n", ["     indented"]),
    ],
)
def test_text_becomes_lines(text, lines):
    assert feed(text) == lines
    assert feed(*text) == lines


def test_newline_after_carriage_return_in_the_next_chunk_is_a_windows_line_end():
    assert feed("a\r", "\nb\n", close=False) == ["a", "b"]


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\x08\x00\x1b"))),
    st.lists(st.integers(0, 1000)),
    st.sampled_from(["\n", "\r\n"]),
)
def test_cuts_do_not_change_lines(lines, at, newline):
    text = "".join(line + newline for line in lines)
    assert feed(*cut(text, at), close=False) == lines


@given(
    st.lists(st.sampled_from(["\r", "\n", "ab", "c", "\x1b[A", "\x1b[31m", "\x1b[K", "\x08", "é"])),
    st.lists(st.integers(0, 99)),
)
def test_screen_takes_anything_and_cuts_hardly_matter(pieces, at):
    text = "".join(pieces)
    whole, parts = feed(text), feed(*cut(text, at))
    # Text with colours is replaced as a whole. An empty line before the first movement is a line; later it is a place
    # on the screen, to come back to.
    if "\x1b[31m" not in text and "\x1b[A" not in text:
        assert list(filter(None, parts)) == list(filter(None, whole))
    assert all("\r" not in line and "\n" not in line for line in parts)


class _Chunks(io.StringIO):
    def __init__(self):
        super().__init__()
        self.chunks = []

    def write(self, text):
        self.chunks.append(text)
        return len(text)


def test_nested_tqdm_bars_end_as_one_line_each():
    file = _Chunks()
    for _ in tqdm(range(3), desc="outer", file=file, mininterval=0):
        for _ in tqdm(range(4), desc="inner", file=file, mininterval=0, leave=False):
            pass
    lines = feed(*file.chunks)
    assert len(lines) == 1
    assert lines[0].startswith("outer: 100%")


def test_nested_tqdm_bars_that_stay_are_all_kept_in_order():
    file = _Chunks()
    for _ in tqdm(range(2), desc="outer", file=file, mininterval=0):
        for _ in tqdm(range(4), desc="inner", file=file, mininterval=0):
            pass
    assert [line.split("|")[0] for line in feed("".join(file.chunks))] == ["inner: 100%", "inner: 100%", "outer: 100%"]


def test_tqdm_write_leaves_its_text_and_one_bar():
    file = _Chunks()
    for step in tqdm(range(3), file=file, mininterval=0):
        tqdm.write(f"step {step}", file=file)
    lines = feed(*file.chunks)
    assert [line for line in lines if "%" not in line] == ["step 0", "step 1", "step 2"]
    assert lines[-1].startswith("100%")
    assert len(lines) == 4


def test_bar_of_another_position_makes_no_empty_lines():
    file = _Chunks()
    for _ in tqdm(range(5), file=file, mininterval=0, position=3):
        pass
    lines = feed("".join(file.chunks))
    assert len(lines) == 1
    assert lines[0].startswith("100%")


def test_finished_bar_waits_for_the_cursor_and_settles():
    buffer = LineBuffer()
    assert buffer.add(buffer.prepare("\r100%\n"), 5.0) == []
    assert buffer.unsettled_since == 5.0
    assert buffer.live() == ["100%"]
    assert buffer.settle() == ["100%"]
    assert buffer.idle


@pytest.mark.parametrize("size", [LINE_MAX + 1, 1_000_000, 20_000_000])
@pytest.mark.parametrize("chunk", [1 << 16, 1 << 30])
def test_long_line_is_cut_with_a_note(size, chunk):
    text = "x" * size + "\nnext\n"
    long, after = feed(*[text[i : i + chunk] for i in range(0, len(text), chunk)])
    assert long == "x" * LINE_MAX + f"… {size - LINE_MAX:,} more characters"
    assert after == "next"


@pytest.mark.parametrize("move", ["\r", "\x08", "\x1b[999C", "\x1b[A"])
def test_long_line_keeps_its_note_when_the_cursor_moves_after_it(move):
    for chunks in [("x" * LINE_MAX, f"xx\n 10%{move} 20%\n"), ("x" * LINE_MAX + "xx", f"\n{move}20%\n")]:
        long, *_ = feed(*chunks)
        assert long == "x" * LINE_MAX + "… 2 more characters"


def test_line_of_the_limit_is_whole():
    assert feed("x" * LINE_MAX + "\n") == ["x" * LINE_MAX]


def test_given_away_partial_line_leaves_no_empty_line_behind():
    buffer = LineBuffer()
    buffer.add("name? ", 1.0)
    assert buffer.since == 1.0
    assert buffer.take_partial() == "name? "
    assert buffer.add("\nnext\n", 2.0) == ["next"]
    buffer.add("dots", 3.0)
    buffer.take_partial()
    assert buffer.add("more\n", 4.0) == ["more"]
