import pytest

from air_nb.runs.checkpoints import (
    RUN_DIR_VARIABLE,
    committed_checkpoints,
    record_checkpoint,
    saves_when_stopped,
    stop_grace_s,
)


def test_a_run_knows_what_it_has_committed_in_order(monkeypatch, tmp_path):
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    record_checkpoint("/data/ckpt/step_10.aa", 10)
    record_checkpoint("s3://bucket/step_20.bb", 20)
    found = committed_checkpoints(tmp_path)
    assert [(checkpoint.path, checkpoint.step) for checkpoint in found] == [
        ("/data/ckpt/step_10.aa", 10),
        ("s3://bucket/step_20.bb", 20),
    ]
    assert (tmp_path / "checkpoints.jsonl").stat().st_mode & 0o077 == 0


def test_outside_a_run_nothing_is_recorded(monkeypatch, tmp_path):
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    record_checkpoint("/data/ckpt/step_10.aa", 10)
    assert list(tmp_path.iterdir()) == []
    assert committed_checkpoints(tmp_path) == []


def test_a_torn_last_line_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    record_checkpoint("/data/ckpt/step_10.aa", 10)
    with (tmp_path / "checkpoints.jsonl").open("a") as file:
        file.write('{"path": "/data/ck')
    assert [checkpoint.step for checkpoint in committed_checkpoints(tmp_path)] == [10]


def test_ranks_that_save_when_stopped_leave_a_mark(tmp_path):
    assert not saves_when_stopped(tmp_path)
    (tmp_path / "saving_rank_3").touch()
    assert saves_when_stopped(tmp_path)


@pytest.mark.parametrize("text,seconds", [(None, 30.0), ("5", 5.0), ("0", 0.0), ("-3", 0.0), ("soon", 30.0)])
def test_the_grace_is_what_the_user_says_else_thirty_seconds(text, seconds):
    assert stop_grace_s({} if text is None else {"AIR_NB_STOP_GRACE_S": text}) == seconds
