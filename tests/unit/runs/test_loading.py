from __future__ import annotations

from pathlib import Path

import pytest

from air_nb.runs.checkpoints import RUN_DIR_VARIABLE
from air_nb.runs.loading import LoadingFigures, loading_file, newest_loading, read_loading, record_loading


def _figures(batches: int = 1, **changes: float) -> LoadingFigures:
    return LoadingFigures(1.0, 2.0, batches, 8, 0.5, 0.25, **changes)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    return Path(tmp_path)


def test_what_a_rank_records_is_read_once_and_in_order(run):
    record_loading(_figures(1))
    path = run / loading_file(1)
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    found, offset = read_loading(path, 0, 1 << 16)
    assert found == [_figures(1)]
    record_loading(_figures(2, hits=3, misses=1, fetched_bytes=10))
    found, offset = read_loading(path, offset, 1 << 16)
    assert found == [_figures(2, hits=3, misses=1, fetched_bytes=10)]
    assert read_loading(path, offset, 1 << 16) == ([], offset)


def test_shares_and_rates():
    figures = _figures(hits=3, misses=1)
    assert (figures.wait_percent, figures.examples_per_s, figures.hit_percent) == (25, 4, 75)
    assert _figures().hit_percent is None
    assert LoadingFigures(1.0, 2.0, 1, 8, 3.0, 1.5).wait_percent == 100, "two threads that waited at once"


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'"x"', b"{}", b'{"at": 1}', b'{"at": "x", "seconds": 1, "batches": 1}', b"\xff"]
)
def test_lines_that_are_none_are_left_out(run, line):
    record_loading(_figures(1))
    with (run / loading_file(1)).open("ab") as file:
        file.write(line + b"\n")
    record_loading(_figures(2))
    assert [one.batches for one in read_loading(run / loading_file(1), 0, 1 << 16)[0]] == [1, 2]


@pytest.mark.parametrize("changes", [{"seconds": 0.0}, {"at": "yesterday"}])
def test_values_that_make_no_figures_are_refused(changes):
    values = {"at": 1.0, "seconds": 2.0, "batches": 1, "examples": 8, "wait_s": 0.5, "longest_wait_s": 0.25}
    line = str(values | changes).replace("'", '"').encode()
    with pytest.raises(ValueError, match="no figures"):
        LoadingFigures.decode(line)


def test_the_newest_of_each_rank_is_found_behind_many_and_before_a_torn_one(run, monkeypatch):
    for rank, lines in ((0, 1), (2, 1000)):
        monkeypatch.setenv("RANK", str(rank))
        for number in range(lines):
            record_loading(_figures(number))
    with (run / loading_file(2)).open("ab") as file:
        file.write(b'{"at": 1.0, "sec')
    assert newest_loading(run, 3) == {0: _figures(0), 2: _figures(999)}


def test_a_line_that_a_full_disk_has_torn_takes_no_other_with_it(run):
    record_loading(_figures(1))
    with (run / loading_file(1)).open("ab") as file:
        file.write(b'{"at": 1.0, "sec')
    record_loading(_figures(2))
    assert [one.batches for one in read_loading(run / loading_file(1), 0, 1 << 16)[0]] == [1, 2]
    assert newest_loading(run, 2) == {1: _figures(2)}


def test_outside_a_run_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    record_loading(_figures())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_ends_no_training(run):
    (run / "loading").write_text("in the way")
    record_loading(_figures())
    assert newest_loading(run, 2) == {}
