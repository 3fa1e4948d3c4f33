"""A reader that has fallen far behind can go on near the end, and says what it left out."""

from __future__ import annotations

from pathlib import Path

from air_nb.protocol.events import Text
from air_nb.runs.directory import RunDirectory
from air_nb.runs.logs import RankLogReader


def _texts(events) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def test_skipping_keeps_the_end_and_says_how_much_is_missing(tmp_path: Path):
    directory = RunDirectory(tmp_path)
    directory.rank_file(0, "out").write_bytes(b"a" * (5 << 20) + b"the end\n")
    with RankLogReader(directory, 0) as reader:
        assert "5 MiB left out" in _texts(reader.skip(8))
        assert _texts(reader.read()) == "the end\n"


def test_skipping_a_short_file_leaves_all_of_it(tmp_path: Path):
    directory = RunDirectory(tmp_path)
    directory.rank_file(0, "out").write_text("short\n")
    with RankLogReader(directory, 0) as reader:
        assert reader.skip(1000) == []
        assert _texts(reader.read()) == "short\n"


def test_events_of_the_skipped_part_still_come(tmp_path: Path):
    directory = RunDirectory(tmp_path)
    directory.rank_file(0, "out").write_bytes(b"a" * 1000 + b"end\n")
    line = '{"o": 500, "e": 0, "k": "display_data", "data": {"text/plain": "figure"}, "metadata": {}}\n'
    directory.rank_file(0, "events").write_text(line)
    with RankLogReader(directory, 0) as reader:
        reader.skip(4)
        kinds = [type(event).__name__ for event in reader.read()]
    assert kinds == ["Rich", "Text"]
