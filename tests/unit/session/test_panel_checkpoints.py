"""The roots that runs have written to, as the panel shows them."""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from air_nb.checkpoint import catalog, commit
from air_nb.checkpoint.manifest import METADATA_FILE, Manifest, record_of
from air_nb.checkpoint.store import open_store
from air_nb.errors import CheckpointError
from air_nb.options import RunOptions
from air_nb.protocol.messages import PROTOCOL_VERSION, RunState
from air_nb.protocol.task import PAYLOAD_FILE, TASK_FILE
from air_nb.runs.directory import RunDirectory, RunRecord
from air_nb.session import checkpoint_rows, roots
from air_nb.session.panel import PanelActions
from air_nb.session.session import Session
from air_nb.sidebar.rows import CheckpointRow, RootRows
from tests.support.wait import eventually

Make = Callable[..., RunDirectory]

_FILES = {"__0_0.distcp": b"a" * 1000, METADATA_FILE: b"m" * 100}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIR_NB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(roots, "_LOOK_S", 0.0)  # what has changed is seen at the next look
    return tmp_path


@pytest.fixture
def panel() -> PanelActions:
    return PanelActions(cast("Session", None))


def _run(name: str, *paths: str, created_at: float = 1.0) -> RunDirectory:
    directory = RunDirectory.create()
    directory.write_record(
        RunRecord(
            directory.run_id,
            name,
            RunState.FINISHED,
            created_at,
            1,
            "cpu",
            options=asdict(RunOptions()) | {"env": []},
            python=platform.python_version(),
            protocol=PROTOCOL_VERSION,
        )
    )
    for file in (PAYLOAD_FILE, TASK_FILE):
        (directory.path / file).touch()
    _note(directory, *paths)
    return directory


def _note(directory: RunDirectory, *paths: str) -> None:
    with (directory.path / "checkpoints.jsonl").open("a") as file:
        file.writelines(json.dumps({"path": path, "step": 1, "at": 1.0}) + "\n" for path in paths)


def _save(root: Path | str, step: int, **more: Any) -> str:
    path = commit.begin(root, step)
    for name, content in _FILES.items():
        open_store(path).write(name, content)
    files = {name: record_of(content) for name, content in _FILES.items()}
    fields: dict[str, Any] = {"created_at": float(step), **more}
    commit.publish(open_store(path), Manifest(step=step, world_size=1, files=files, **fields))
    return path


def _only(panel: PanelActions) -> RootRows:
    (root,) = panel.checkpoints()
    return root


def _rows(panel: PanelActions) -> dict[int | None, CheckpointRow]:
    return {row.step: row for row in _only(panel).checkpoints}


def test_a_root_has_its_checkpoints_newest_first_and_who_wrote_them(home, panel):
    first, second = (_save(home / "root", step) for step in (1, 2))
    one, two = _run("one", first), _run("two", second, created_at=2.0)
    root = _only(panel)
    assert (root.root, root.problem, root.more) == (str(home / "root"), "", 0)
    assert [(row.path, row.step, row.run_id, row.run_name, row.created_at) for row in root.checkpoints] == [
        (second, 2, two.run_id, "two", 2.0),
        (first, 1, one.run_id, "one", 1.0),
    ]
    row = root.checkpoints[0]
    assert (row.state, row.verified, row.verifying, row.problem, row.can_resume) == ("committed", None, False, "", True)
    assert row.size_bytes is not None
    assert row.size_bytes > 1100


def test_the_manifest_says_who_wrote_what_no_run_here_remembers(home, panel):
    _save(home / "root", 1, run_id="gone", run_name="old-gecko-1")
    _run("one", _save(home / "root", 2))
    row = _rows(panel)[1]
    assert (row.run_id, row.run_name, row.can_resume) == ("gone", "old-gecko-1", False)


def test_a_path_that_two_runs_have_written_is_the_newer_ones(home, panel):
    path = _save(home / "root", 1)
    _run("old", path, created_at=1.0)
    _run("new", path, created_at=2.0)
    assert _rows(panel)[1].run_name == "new"


def test_what_retention_has_deleted_is_left_out_and_so_is_a_root_without_any(home, panel):
    run = _run("one", path := _save(home / "root", 1), str(home / "root" / "step_0.00000000"))
    assert list(_rows(panel)) == [1]
    _note(run, _save(home / "root", 2))
    assert list(_rows(panel)) == [2, 1]
    assert [row.run_name for row in _rows(panel).values()] == ["one", "one"]
    commit.remove(open_store(path))
    assert eventually(lambda: list(_rows(panel)) == [2])
    _run("two", str(home / "nowhere" / "step_1.00000000"))
    assert [root.root for root in panel.checkpoints()] == [str(home / "root")]


def test_one_that_was_never_completed_and_one_that_is_damaged_say_why(home, panel):
    damaged = _save(home / "root", 1)
    (Path(damaged) / "__0_0.distcp").write_bytes(b"short")
    commit.begin(home / "root", 2)
    _run("one", damaged)
    rows = _rows(panel)
    assert (rows[1].state, rows[1].can_resume) == ("damaged", False)
    assert "5 bytes" in rows[1].problem
    assert (rows[2].state, rows[2].can_resume) == ("incomplete", False)


def test_a_root_is_listed_again_only_when_something_has_changed(home, panel, monkeypatch):
    listed: list[str] = []
    real = catalog.list_checkpoints

    def noted(root: str) -> list[catalog.CheckpointInfo]:
        listed.append(root)
        return real(root)

    monkeypatch.setattr(catalog, "list_checkpoints", noted)
    _run("one", _save(home / "root", 1))
    for _ in range(4):
        assert list(_rows(panel)) == [1]
    assert len(listed) == 1
    _save(home / "root", 2)
    assert eventually(lambda: list(_rows(panel)) == [2, 1])
    assert len(listed) == 2


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_a_root_that_is_not_ours_says_so(home, panel):
    path = _save(home / "root", 1)
    _run("one", path)
    (home / "root").chmod(0)
    try:
        assert "can't be listed" in _only(panel).problem
    finally:
        (home / "root").chmod(0o700)


def test_a_root_that_can_not_be_listed_keeps_what_was_there(home, panel, monkeypatch):
    _run("one", _save(home / "root", 1))
    assert list(_rows(panel)) == [1]

    def fail(root: str) -> None:
        raise OSError(5, "Input/output error", root)

    monkeypatch.setattr(catalog, "list_checkpoints", fail)
    _save(home / "root", 2)
    assert eventually(lambda: "Input/output error" in _only(panel).problem)
    assert list(_rows(panel)) == [1]


def test_a_root_that_is_a_file_says_so(home, panel):
    (home / "root").write_text("")
    _run("one", str(home / "root" / "step_1.00000000"))
    root = _only(panel)
    assert root.problem.startswith("it can't be listed: ")
    assert root.checkpoints == ()


@pytest.fixture
def hanging(monkeypatch) -> Iterator[threading.Event]:
    """URLs don't answer until this is set."""
    answer = threading.Event()
    real = catalog.list_checkpoints

    def listed(root: str) -> list[catalog.CheckpointInfo]:
        if "://" in root:
            answer.wait(30)
        return real(root)

    monkeypatch.setattr(catalog, "list_checkpoints", listed)
    yield answer
    answer.set()
    assert eventually(lambda: not any("list-checkpoints" in thread.name for thread in threading.enumerate()))


def test_a_store_that_does_not_answer_holds_nobody_up(home, panel, hanging, monkeypatch):
    _run("one", far := _save("memory://panel/root", 5), near := _save(home / "root", 1))
    found = {root.root: root for root in panel.checkpoints()}
    assert [row.path for row in found[str(home / "root")].checkpoints] == [near]
    assert found["memory://panel/root"].problem == "being listed"
    monkeypatch.setattr(roots, "_SLOW_S", 0.0)
    assert eventually(
        lambda: "no answer" in {root.root: root for root in panel.checkpoints()}[roots.root_of(far)].problem
    )
    hanging.set()
    assert eventually(lambda: sum(len(root.checkpoints) for root in panel.checkpoints()) == 2)


def test_no_more_than_a_few_roots_are_listed_at_a_time(home, panel, hanging, monkeypatch):
    monkeypatch.setattr(roots, "_MAX_THREADS", 2)
    _run("one", *[f"memory://panel/root{number}/step_1.00000000" for number in range(5)])
    assert len(panel.checkpoints()) == 5
    threads = [thread for thread in threading.enumerate() if thread.name == "air_nb-list-checkpoints"]
    assert len(threads) == 2


def test_of_many_roots_each_has_its_turn(home, panel, monkeypatch):
    monkeypatch.setattr(roots, "_MAX_THREADS", 2)
    monkeypatch.setattr(roots, "_WAIT_S", 0.0)
    monkeypatch.setattr(roots, "_LOOK_S", 0.0)
    for number in range(7):
        _run(f"run{number}", _save(home / f"root{number}", 1), created_at=float(number))
    assert eventually(lambda: all(root.checkpoints for root in panel.checkpoints()))


def test_roots_that_hang_for_long_leave_the_threads_to_others(home, panel, hanging, monkeypatch):
    monkeypatch.setattr(roots, "_MAX_THREADS", 2)
    monkeypatch.setattr(roots, "_SLOW_S", 0.05)
    _run("far", *[f"memory://panel/hung{number}/step_1.00000000" for number in range(4)], created_at=2.0)
    _run("near", _save(home / "root", 1))
    assert eventually(lambda: any(root.checkpoints for root in panel.checkpoints()))


def test_many_are_cut_off_and_counted(home, panel, monkeypatch):
    monkeypatch.setattr(checkpoint_rows, "_SHOWN", 2)
    _run("one", *[_save(home / "root", step) for step in range(5)])
    root = _only(panel)
    assert ([row.step for row in root.checkpoints], root.more) == ([4, 3], 3)


# -------------------------------------------------------------------------------------------------------------- verify


def test_a_deep_check_is_remembered_until_the_path_is_written_again(home, panel):
    _run("one", path := _save(home / "root", 1))
    assert panel.verify(path) == f"{Path(path).name}: every byte is as it was committed"
    assert _rows(panel)[1].verified is True
    store = open_store(path)
    store.write("manifest.json", store.read("manifest.json").replace(b"1.0", b"2.0"))  # as if committed at another time
    (Path(path) / "COMMIT").write_text(json.dumps({"manifest": asdict(record_of(store.read("manifest.json")))}))
    assert eventually(lambda: _rows(panel)[1].created_at == 2.0)
    assert _rows(panel)[1].verified is None


def test_a_flipped_bit_is_found_and_the_checkpoint_is_not_offered(home, panel):
    _run("one", path := _save(home / "root", 1))
    (Path(path) / "__0_0.distcp").write_bytes(b"b" + b"a" * 999)
    assert _rows(panel)[1].can_resume
    assert panel.verify(path).startswith(f"{Path(path).name} is damaged: __0_0.distcp is not what was written")
    row = _rows(panel)[1]
    assert (row.verified, row.can_resume) == (False, False)
    assert "__0_0.distcp is not what was written" in row.problem


def test_while_it_is_checked_the_row_says_so_and_nobody_checks_it_too(home, panel, monkeypatch):
    _run("one", path := _save(home / "root", 1))
    seen = []

    def check(path: str, *, deep: bool) -> catalog.Verdict:
        seen.append(_rows(panel)[1].verifying)
        with pytest.raises(CheckpointError, match="is being checked already"):
            panel.verify(path)
        return catalog.Verdict(deep)

    monkeypatch.setattr(catalog, "verify", check)
    panel.verify(path)
    assert seen == [True]
    assert not _rows(panel)[1].verifying


def test_what_was_never_completed_is_not_verified(home, panel):
    assert "it was never completed" in panel.verify(str(home / "root" / "step_1.00000000"))
