from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_nb.protocol.tracking import TrackingRequest, spool_name
from air_nb.runs.checkpoints import RUN_DIR_VARIABLE, record_checkpoint
from air_nb.runs.loading import LoadingFigures, record_loading
from air_nb.tracking.forward import Batch, Forwarder, batches, send
from air_nb.tracking.spool import SpoolEntry
from air_nb.tracking.store import StoreError
from air_nb.tracking.tracked_file import TrackedFile


class _Run:
    """Stands for ``MlflowRun``: takes what it is told to take."""

    def __init__(self, takes: Callable[[Batch], bool] = lambda _: True, *, usable: bool = True) -> None:
        self.taken: list[Batch] = []
        self._takes = takes
        self._usable = usable
        self.passing = False

    def log_batch(self, metrics: Any = (), params: Any = None, tags: Any = None) -> None:
        batch = Batch(list(metrics), dict(params or {}), dict(tags or {}))
        if not self._takes(batch):
            raise StoreError("http://server", "no", passing=self.passing)
        self.taken.append(batch)

    def prove_usable(self) -> None:
        if not self._usable:
            raise StoreError("http://server", "the run was deleted")


def _metrics(number: int, key: str = "loss") -> list[tuple[str, float, int, int]]:
    return [(key, float(step), step, step) for step in range(number)]


def _send(run: _Run, batch: Batch) -> list[str]:
    refused: list[str] = []
    send(run, batch, refused.append)  # type: ignore[arg-type]
    return refused


# ------------------------------------------------------------------------------------------------------------ batches

_texts = st.text("abc", min_size=1, max_size=2)
_pairs = st.lists(st.tuples(_texts, _texts), max_size=150)
_entries = st.lists(
    st.builds(
        SpoolEntry,
        metrics=st.integers(0, 1200).map(_metrics),
        params=_pairs,
        tags=_pairs,
        run_name=st.none() | _texts,
    ),
    max_size=5,
)


@given(_entries)
def test_batches_hold_everything_in_its_order_within_mlflows_limits(entries):
    made = list(batches(entries))
    assert all(0 < len(batch) <= 1000 for batch in made)
    assert all(max(len(batch.params), len(batch.tags)) <= 100 for batch in made)
    assert [m for batch in made for m in batch.metrics] == [m for entry in entries for m in entry.metrics]
    tags: dict[str, str] = {}
    expected: dict[str, str] = {}
    for batch in made:
        tags |= batch.tags
    for entry in entries:
        expected |= dict(entry.tags) | ({"mlflow.runName": entry.run_name} if entry.run_name else {})
    assert tags == expected
    assert {p for batch in made for p in batch.params.items()} == {tuple(p) for entry in entries for p in entry.params}


def test_a_parameter_that_changes_is_in_a_batch_of_its_own_time():
    made = list(batches([SpoolEntry(params=[("lr", "1"), ("lr", "1"), ("lr", "2")])]))
    assert [batch.params for batch in made] == [{"lr": "1"}, {"lr": "2"}]


# ------------------------------------------------------------------------------------------------------------- sending


def test_of_a_batch_that_is_refused_only_the_bad_values_are():
    run = _Run(lambda batch: all(m[3] != 700 for m in batch.metrics) and "bad" not in batch.params)
    refused = _send(run, Batch(_metrics(900), {"good": "1", "bad": "2"}, {"tag": "x"}))
    assert sorted(refused) == ["Metric loss=700.0 of step 700: no.", "Parameter bad='2': no."]
    assert sorted(m[3] for batch in run.taken for m in batch.metrics) == [s for s in range(900) if s != 700]
    assert [batch.params for batch in run.taken if batch.params] == [{"good": "1"}]
    assert {"tag": "x"} in [batch.tags for batch in run.taken]


def test_a_store_that_takes_nothing_any_more_refuses_nothing_value_by_value():
    run = _Run(lambda _: False, usable=False)
    with pytest.raises(StoreError, match="the run was deleted"):
        _send(run, Batch(_metrics(10)))


def test_trouble_with_the_connection_says_nothing_against_the_values():
    run = _Run(lambda _: False)
    run.passing = True
    with pytest.raises(StoreError, match="no"):
        _send(run, Batch(_metrics(10)))


# ---------------------------------------------------------------------------------------------------------- forwarding


@pytest.fixture
def tracked(tmp_path) -> TrackedFile:
    return TrackedFile(tmp_path, TrackingRequest("calm-otter-41", "sqlite:////mlflow.db"))


def _spool(directory: Path, rank: int, *entries: SpoolEntry) -> None:
    (directory / spool_name(rank)).parent.mkdir(exist_ok=True)
    with (directory / spool_name(rank)).open("ab") as file:
        file.writelines(entry.encode() for entry in entries)


def test_ranks_share_a_batch(tmp_path, tracked):
    for rank in range(3):
        _spool(tmp_path, rank, SpoolEntry(metrics=_metrics(2, f"loss_{rank}")))
    run = _Run()
    forwarder = Forwarder(tmp_path, 3, tracked)
    assert forwarder.forward(run, None)  # type: ignore[arg-type]
    assert [len(batch.metrics) for batch in run.taken] == [6]
    assert not forwarder.forward(run, None)  # type: ignore[arg-type]
    assert len(run.taken) == 1


def test_offsets_stay_where_they_are_while_the_store_is_not_there(tmp_path, tracked):
    _spool(tmp_path, 0, SpoolEntry(metrics=_metrics(2)))
    run = _Run(lambda _: False)
    run.passing = True
    with pytest.raises(StoreError):
        Forwarder(tmp_path, 1, tracked).forward(run, None)  # type: ignore[arg-type]
    assert tracked.now.sent == []
    again = _Run()
    Forwarder(tmp_path, 1, tracked).forward(again, None)  # type: ignore[arg-type]
    assert [batch.metrics for batch in again.taken] == [_metrics(2)]


def test_a_process_that_comes_later_goes_on_where_the_last_one_was(tmp_path, tracked):
    _spool(tmp_path, 1, SpoolEntry(metrics=_metrics(1, "first")))
    Forwarder(tmp_path, 2, tracked).forward(_Run(), None)  # type: ignore[arg-type]
    _spool(tmp_path, 1, SpoolEntry(metrics=_metrics(1, "second")))
    run = _Run()
    later = TrackedFile(tmp_path, TrackingRequest("calm-otter-41", "sqlite:////mlflow.db"))
    Forwarder(tmp_path, 2, later).forward(run, None)  # type: ignore[arg-type]
    assert [batch.metrics for batch in run.taken] == [_metrics(1, "second")]


def test_a_long_spool_is_read_in_parts(tmp_path, tracked, monkeypatch):
    monkeypatch.setattr("air_nb.tracking.forward._PART_BYTES", 1000)
    _spool(tmp_path, 0, *(SpoolEntry(metrics=[metric]) for metric in _metrics(100)))
    run = _Run()
    forwarder = Forwarder(tmp_path, 1, tracked)
    while forwarder.forward(run, None):  # type: ignore[arg-type]
        pass
    assert len(run.taken) > 1
    assert [m for batch in run.taken for m in batch.metrics] == _metrics(100)


def test_lines_that_are_torn_are_counted_and_skipped(tmp_path, tracked):
    (tmp_path / spool_name(0)).parent.mkdir()
    (tmp_path / spool_name(0)).write_bytes(b'{"metrics": [["lo\n')
    _spool(tmp_path, 0, SpoolEntry(metrics=_metrics(1)))
    run = _Run()
    Forwarder(tmp_path, 1, tracked).forward(run, None)  # type: ignore[arg-type]
    assert len(run.taken) == 1
    assert tracked.now.refused == ["Rank 0 left 1 entries that can't be read: was its disk full?"]


def test_what_ranks_measure_of_their_loaders_is_sent_once_also_by_a_process_that_comes_later(
    tmp_path, tracked, monkeypatch
):
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    record_loading(LoadingFigures(2.0, 10.0, 7, 100, 2.5, 1.5))
    run = _Run()
    forwarder = Forwarder(tmp_path, 2, tracked)
    assert forwarder.forward(run, None)  # type: ignore[arg-type]
    assert not forwarder.forward(run, None)  # type: ignore[arg-type]
    assert [batch.metrics for batch in run.taken] == [
        [
            ("air_nb/data_wait_percent/rank_1", 25.0, 2000, 7),
            ("air_nb/data_longest_wait_seconds/rank_1", 1.5, 2000, 7),
            ("air_nb/data_examples_per_second/rank_1", 10.0, 2000, 7),
        ]
    ]
    record_loading(LoadingFigures(3.0, 10.0, 8, 100, 2.5, 1.5, hits=1, misses=3, fetched_bytes=9))
    later = TrackedFile(tmp_path, TrackingRequest("calm-otter-41", "sqlite:////mlflow.db"))
    again = _Run()
    Forwarder(tmp_path, 2, later).forward(again, None)  # type: ignore[arg-type]
    (batch,) = again.taken
    assert {key: value for key, value, _, step in batch.metrics if step == 8 and "cache" in key} == {
        "air_nb/cache_hit_percent/rank_1": 25.0,
        "air_nb/cache_fetched_bytes/rank_1": 9.0,
    }
    assert len(batch.metrics) == 5


def test_checkpoints_are_sent_once_also_by_a_process_that_comes_later(tmp_path, tracked, monkeypatch):
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    record_checkpoint("/data/step_10.aa", 10, stall_s=0.25, seconds=2.0, size_bytes=4000)
    run = _Run()
    forwarder = Forwarder(tmp_path, 1, tracked)
    assert forwarder.forward(run, None)  # type: ignore[arg-type]
    assert not forwarder.forward(run, None)  # type: ignore[arg-type]
    (batch,) = run.taken
    assert [(key, value, step) for key, value, _, step in batch.metrics] == [
        ("air_nb/checkpoint_stall_seconds", 0.25, 10),
        ("air_nb/checkpoint_save_seconds", 2.0, 10),
        ("air_nb/checkpoint_bytes", 4000.0, 10),
    ]
    assert batch.tags == {"air_nb.checkpoint.10": "/data/step_10.aa"}
    record_checkpoint("/data/step_20.bb", 20, stall_s=0.5, seconds=2.0, size_bytes=4000)
    later = TrackedFile(tmp_path, TrackingRequest("calm-otter-41", "sqlite:////mlflow.db"))
    again = _Run()
    Forwarder(tmp_path, 1, later).forward(again, None)  # type: ignore[arg-type]
    (batch,) = again.taken
    assert {step for _, _, _, step in batch.metrics} == {20}
    assert batch.tags == {"air_nb.checkpoint.20": "/data/step_20.bb"}


def test_a_checkpoint_that_the_store_does_not_take_holds_up_nothing(tmp_path, tracked, monkeypatch):
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    record_checkpoint("/data/step_10.aa", 10, stall_s=0.25, seconds=2.0, size_bytes=4000)
    _spool(tmp_path, 0, SpoolEntry(metrics=_metrics(1)))
    run = _Run(lambda batch: not batch.tags)
    forwarder = Forwarder(tmp_path, 1, tracked)
    forwarder.forward(run, None)  # type: ignore[arg-type]
    assert not forwarder.forward(run, None)  # type: ignore[arg-type]
    assert sum(len(batch.metrics) for batch in run.taken) == 4
    assert len(tracked.now.refused) == 1
    assert "air_nb.checkpoint.10" in tracked.now.refused[0]


def test_a_checkpoint_of_unknown_cost_is_a_tag_without_metrics(tmp_path, tracked):
    (tmp_path / "checkpoints.jsonl").write_text('{"path": "/data/step_10.aa", "step": 10, "at": 1.0}\n')
    run = _Run()
    Forwarder(tmp_path, 1, tracked).forward(run, None)  # type: ignore[arg-type]
    (batch,) = run.taken
    assert (batch.metrics, batch.tags) == ([], {"air_nb.checkpoint.10": "/data/step_10.aa"})
