"""Hundreds of run directories, looked at every second."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from air_nb.protocol.messages import RunState
from air_nb.runs import index as module
from air_nb.runs.directory import RunDirectory, RunRecord
from air_nb.runs.index import RunIndex, local_roots
from air_nb.runs.liveness import ProcessId


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIR_NB_HOME", str(tmp_path))
    return tmp_path


def _run(name: str, created_at: float) -> RunDirectory:
    directory = RunDirectory.create()
    directory.write_record(RunRecord(directory.run_id, name, RunState.FINISHED, created_at, 1, "cpu"))
    return directory


def _names(index: RunIndex) -> list[str]:
    return [record.name for _, record in index.runs()]


def test_the_newest_is_first_and_what_changes_is_seen(home):
    index = RunIndex()
    first, second = _run("first", 1.0), _run("second", 2.0)
    assert _names(index) == ["second", "first"]
    first.update_record(name="other")
    assert _names(index) == ["second", "other"]
    shutil.rmtree(second.path)
    assert _names(index) == ["other"]


def test_a_record_is_read_once(home, monkeypatch):
    read: list[str] = []
    monkeypatch.setattr(module, "_read", read.append)
    index = RunIndex()
    _run("only", 1.0)
    (home / "runs" / "not a run").mkdir()
    for _ in range(3):
        index.runs()
    assert len(read) == 1


def test_foreign_and_half_written_directories_are_left_out(home):
    _run("good", 1.0)
    for name, text in (("half", '{"run_id": "x'), ("foreign", "[]"), ("newer", '{"state": "ODD"}')):
        (home / "runs" / name).mkdir()
        (home / "runs" / name / "run.json").write_text(text)
    (home / "runs" / "a file").touch()
    (home / "runs" / "dangling").symlink_to("/nowhere")
    (home / "runs" / "directory").mkdir()
    (home / "runs" / "directory" / "run.json").mkdir()
    assert _names(RunIndex()) == ["good"]


def test_a_run_that_is_just_moving_home_is_listed_once(home):
    directory = _run("moving", 1.0)
    node_local = Path(os.environ["TMPDIR"]) / f"air_nb-{os.getuid()}" / "runs"
    shutil.copytree(directory.path, node_local / directory.run_id)
    try:
        ((found, _),) = RunIndex().runs()
        assert found.path == node_local / directory.run_id
    finally:
        shutil.rmtree(node_local / directory.run_id)


def test_a_run_is_found_by_its_id_alone(home):
    directory = _run("name", 1.0)
    assert RunIndex().find(directory.run_id)[1].name == "name"
    for wrong in ("name", directory.run_id[:-1], ""):
        with pytest.raises(LookupError, match="there is no run"):
            RunIndex().find(wrong)


def test_live_runs_are_those_whose_launcher_lives(home):
    _run("ended", 1.0)
    for name, owner in (("dead", ProcessId(1, 1)), ("live", ProcessId.own())):
        directory = RunDirectory.create()
        directory.write_record(
            RunRecord(directory.run_id, name, RunState.RUNNING, 2.0, 1, "cpu", kernel=owner, launcher=owner)
        )
    assert [record.name for record in RunIndex().live()] == ["live"]


def test_a_home_on_a_network_is_no_local_root(home, monkeypatch):
    assert local_roots()[0] == home / "runs"
    monkeypatch.setattr(module, "is_network_path", lambda path: True)
    assert home / "runs" not in local_roots()
    _run("there", 1.0)
    assert _names(RunIndex(local_roots())) == []
