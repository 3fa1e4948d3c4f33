from typing import Any

import pytest

from air_nb.runs.checkpoints import (
    RUN_DIR_VARIABLE,
    CommittedCheckpoint,
    committed_checkpoints,
    newest_checkpoint,
    record_checkpoint,
    saves_when_stopped,
    stop_grace_s,
)

_COST: dict[str, Any] = {"stall_s": 0.25, "seconds": 2.0, "size_bytes": 4000}


def test_a_run_knows_what_it_has_committed_in_order(monkeypatch, tmp_path):
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    record_checkpoint("/data/ckpt/step_10.aa", 10, **_COST)
    record_checkpoint("s3://bucket/step_20.bb", 20, **_COST)
    found = committed_checkpoints(tmp_path)
    assert [(checkpoint.path, checkpoint.step) for checkpoint in found] == [
        ("/data/ckpt/step_10.aa", 10),
        ("s3://bucket/step_20.bb", 20),
    ]
    assert newest_checkpoint(tmp_path) == found[-1]
    assert (found[0].stall_s, found[0].seconds, found[0].size_bytes) == (0.25, 2.0, 4000)
    assert (tmp_path / "checkpoints.jsonl").stat().st_mode & 0o077 == 0


def test_outside_a_run_nothing_is_recorded(monkeypatch, tmp_path):
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    record_checkpoint("/data/ckpt/step_10.aa", 10, **_COST)
    assert list(tmp_path.iterdir()) == []
    assert committed_checkpoints(tmp_path) == []
    assert newest_checkpoint(tmp_path) is None


def test_the_newest_of_thousands_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    for step in range(1000):
        record_checkpoint(f"/data/ckpt/{'x' * 100}/step_{step}", step, **_COST)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.step == 999


def test_a_checkpoint_that_an_earlier_version_noted_is_there_without_its_cost(tmp_path):
    (tmp_path / "checkpoints.jsonl").write_text('{"path": "/data/ckpt/step_10.aa", "step": 10, "at": 1.0}\n')
    assert committed_checkpoints(tmp_path) == [CommittedCheckpoint("/data/ckpt/step_10.aa", 10, 1.0)]
    assert newest_checkpoint(tmp_path) == CommittedCheckpoint("/data/ckpt/step_10.aa", 10, 1.0)


def test_a_torn_last_line_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    record_checkpoint("/data/ckpt/step_10.aa", 10, **_COST)
    with (tmp_path / "checkpoints.jsonl").open("a") as file:
        file.write('{"path": "/data/ck')
    assert [checkpoint.step for checkpoint in committed_checkpoints(tmp_path)] == [10]
    assert newest_checkpoint(tmp_path) == committed_checkpoints(tmp_path)[0]


def test_ranks_that_save_when_stopped_leave_a_mark(tmp_path):
    assert not saves_when_stopped(tmp_path)
    (tmp_path / "saving_rank_3").touch()
    assert saves_when_stopped(tmp_path)


@pytest.mark.parametrize("text,seconds", [(None, 30.0), ("5", 5.0), ("0", 0.0), ("-3", 0.0), ("soon", 30.0)])
def test_the_grace_is_what_the_user_says_else_thirty_seconds(text, seconds):
    assert stop_grace_s({} if text is None else {"AIR_NB_STOP_GRACE_S": text}) == seconds
