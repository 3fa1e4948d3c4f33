from __future__ import annotations

import subprocess

import pytest

from air_nb.protocol.messages import RunState
from air_nb.protocol.tracking import TrackingRequest
from air_nb.runs.directory import RunRecord
from air_nb.tracking.facts import GitState, ending, git_state, git_values, opening_tags

_REQUEST = TrackingRequest("calm-otter-41", "sqlite:////mlflow.db")


def _record(state: RunState = RunState.RUNNING, **fields) -> RunRecord:
    return RunRecord("20270101-000000-00000000", "calm-otter-41", state, 1.0, 2, "cpu", **fields)


def test_a_run_without_parent_or_source_has_no_tags_of_them():
    assert set(opening_tags(_REQUEST, _record())) <= {"air_nb.run_id", "mlflow.source.type", "mlflow.user"}


def test_a_user_without_a_name_is_no_error(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "MLFLOW_TRACKING_USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    assert "mlflow.user" not in opening_tags(_REQUEST, _record())


@pytest.mark.parametrize(
    "state, status",
    [
        (RunState.FINISHED, "FINISHED"),
        (RunState.FAILED, "FAILED"),
        (RunState.KILLED, "KILLED"),
        (RunState.TIMED_OUT, "KILLED"),
        (RunState.RUNNING, "KILLED"),
        (RunState.STARTING, "KILLED"),
    ],
)
def test_every_state_has_a_status_that_mlflow_knows(state, status):
    assert ending(_record(state)).status == status


def test_the_first_failure_is_the_one_in_the_tags():
    failures = [
        {"rank": 5, "type_name": "torch.OutOfMemoryError", "message": "CUDA out of memory"},
        {"rank": 0, "type_name": "RuntimeError", "message": "connection closed by peer"},
    ]
    tags = ending(_record(RunState.FAILED, failures=failures)).tags
    assert tags == {
        "air_nb.failure": "torch.OutOfMemoryError: CUDA out of memory",
        "air_nb.failing_rank": "5",
    }


def test_a_death_has_no_exception_type_in_its_tag():
    failures = [{"rank": 0, "type_name": "", "message": "killed by SIGSEGV"}]
    assert ending(_record(RunState.FAILED, failures=failures)).tags["air_nb.failure"] == "killed by SIGSEGV"


def test_a_failure_outside_the_ranks_is_told_by_its_reason():
    assert ending(_record(RunState.FAILED, reason="no rank could be forked")).tags == {
        "air_nb.failure": "no rank could be forked"
    }


def test_a_long_failure_fits_into_a_tag():
    failures = [{"rank": 0, "type_name": "ValueError", "message": "x" * 100_000}]
    text = ending(_record(RunState.FAILED, failures=failures)).tags["air_nb.failure"]
    assert len(text) == 5000
    assert text.endswith("x…")


def test_a_timeout_without_a_reason_still_says_what_it_was():
    assert ending(_record(RunState.TIMED_OUT)).tags == {"air_nb.reason": "timed out"}


def test_no_repository_means_no_git_values(tmp_path):
    assert git_state(str(tmp_path)) is None
    assert git_state(str(tmp_path / "nowhere")) is None
    assert git_values(None) == ({}, {})


def test_a_clean_repository_is_not_dirty_and_untracked_files_do_not_make_it_so(tmp_path):
    identity = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    for arguments in (["init"], ["commit", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "notes.txt").write_text("mine")
    state = git_state(str(tmp_path))
    assert state is not None
    assert (len(state.commit), state.dirty) == (40, False)


def test_a_git_that_hangs_is_given_up(tmp_path, monkeypatch):
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("air_nb.tracking.facts._GIT_TIMEOUT_S", 0.1)
    assert git_state(str(tmp_path)) is None


def test_a_tree_that_could_not_be_looked_at_is_neither_clean_nor_dirty():
    assert git_values(GitState("ab" * 20, None))[0]["air_nb.git_dirty"] == "unknown"
