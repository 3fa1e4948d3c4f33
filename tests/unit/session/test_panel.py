"""Rows and logs for the panel, from directories that runs might have left."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from air_nb.errors import CheckpointError, RunError
from air_nb.options import RunOptions
from air_nb.protocol.messages import PROTOCOL_VERSION, RunState
from air_nb.protocol.task import PAYLOAD_FILE, TASK_FILE, RankTask
from air_nb.protocol.tracking import TRACKED_FILE, TrackedRun, TrackedState
from air_nb.runs.checkpoints import RUN_DIR_VARIABLE, record_checkpoint
from air_nb.runs.directory import RunDirectory, RunRecord
from air_nb.runs.liveness import ProcessId
from air_nb.runs.loading import LoadingFigures, record_loading
from air_nb.session import run_files
from air_nb.session.panel import PanelActions
from air_nb.session.relaunch import next_name
from air_nb.session.session import Session
from air_nb.sidebar.rows import Link, LogChunk, RunRow

Make = Callable[..., RunDirectory]

_GONE = ProcessId(1, 1)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a run that has ended, and could be launched again, unless told otherwise."""
    monkeypatch.setenv("AIR_NB_HOME", str(tmp_path / "home"))
    created_at = iter(range(1, 1000))

    def make_run(name: str = "calm-otter-41", **fields: Any) -> RunDirectory:
        directory = RunDirectory.create()
        values: dict[str, Any] = {
            "state": RunState.FINISHED,
            "created_at": float(next(created_at)),
            "nproc": 2,
            "device": "cpu",
            "options": asdict(RunOptions()) | {"env": []},
            "python": platform.python_version(),
            "protocol": PROTOCOL_VERSION,
        }
        directory.write_record(RunRecord(directory.run_id, name, **(values | fields)))
        (directory.path / PAYLOAD_FILE).touch()
        RankTask("cell", name, "", "", 1, str(tmp_path), [], []).write(directory.path)
        return directory

    return make_run


@pytest.fixture
def panel() -> PanelActions:
    """Without a session: nothing is launched here."""
    return PanelActions(cast("Session", None))


def _row(panel: PanelActions, directory: RunDirectory) -> RunRow:
    (row,) = (row for row in panel.runs() if row.run_id == directory.run_id)
    return row


# ---------------------------------------------------------------------------------------------------------------- runs


def test_a_row_says_what_the_record_says(make: Make, panel: PanelActions):
    directory = make(
        state=RunState.FAILED,
        started_at=2.0,
        ended_at=3.0,
        notebook="/home/me/train.ipynb",
        failures=[{"rank": 1, "type_name": "ValueError", "message": "no"}],
    )
    directory.rank_file(0, "out").write_text("one\ntwo\n")
    assert _row(panel, directory) == RunRow(
        run_id=directory.run_id,
        name="calm-otter-41",
        state="FAILED",
        is_live=False,
        is_mine=False,
        notebook="train.ipynb",
        nproc=2,
        device="cpu",
        created_at=1.0,
        started_at=2.0,
        ended_at=3.0,
        reason="rank 1: ValueError: no",
        line="two",
        figures="",
        link=None,
        can_resume=True,
    )


def test_what_loading_costs_moves_while_a_run_is_live_and_stays_when_it_has_ended(
    make: Make, panel: PanelActions, monkeypatch: pytest.MonkeyPatch
):
    own = ProcessId.own()
    directory = make(state=RunState.RUNNING, kernel=own, launcher=own)
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(directory.path))
    seen = []
    for rank, wait_s in ((0, 1.0), (1, 4.0), (0, 6.0)):
        monkeypatch.setenv("RANK", str(rank))
        record_loading(LoadingFigures(1.0, 10.0, 5, 1000, wait_s, wait_s))
        seen.append(_row(panel, directory).figures)
    assert seen == [
        "data wait 10 % · 100 examples/s",
        "data wait 40 % (rank 1) · 200 examples/s",
        "data wait 60 % (rank 0) · 200 examples/s",
    ]
    record_checkpoint("/data/step_1.aa", 1, stall_s=0.037, seconds=1.0, size_bytes=10)
    directory.update_record(state=RunState.FINISHED)
    assert _row(panel, directory).figures == f"{seen[-1]} · last save held up training for 37 ms"


def test_all_live_runs_and_the_last_20_that_ended_are_there_newest_first(make: Make, panel: PanelActions):
    own = ProcessId.own()
    live = make("live", state=RunState.RUNNING, kernel=own, launcher=own)
    ended = [make(f"ended-{number}") for number in range(25)]
    shown = [row.run_id for row in panel.runs()]
    assert shown == [run.run_id for run in reversed(ended[5:])] + [live.run_id]


def test_a_live_run_of_this_kernel_is_mine_and_its_line_moves(make: Make, panel: PanelActions):
    own = ProcessId.own()
    directory = make(state=RunState.RUNNING, kernel=own, launcher=own)
    assert (_row(panel, directory).is_live, _row(panel, directory).is_mine, _row(panel, directory).line) == (
        True,
        True,
        "",
    )
    directory.rank_file(0, "err").write_text("\r 10%\r 20%")
    assert _row(panel, directory).line == "20%"
    assert not _row(panel, directory).can_resume


def test_a_run_whose_processes_are_gone_is_shown_as_killed(make: Make, panel: PanelActions):
    row = _row(panel, make(state=RunState.RUNNING, kernel=_GONE, launcher=_GONE))
    assert (row.state, row.is_live, row.can_resume) == ("KILLED", False, True)
    assert row.reason == "its kernel and launcher died before it ended"


def test_the_link_comes_also_after_the_end(make: Make, panel: PanelActions):
    directory = make()
    assert _row(panel, directory).link is None
    tracked = TrackedRun(TrackedState.ENDED, "http://mlflow:5000", mlflow_run_id="r", experiment_id="7")
    (directory.path / TRACKED_FILE).write_text(tracked.encode())
    url = "http://mlflow:5000/#/experiments/7/runs/r"
    assert _row(panel, directory).link == Link(url, "MLflow", url)


# ---------------------------------------------------------------------------------------------------- can be resumed?


@pytest.mark.parametrize(
    "fields",
    [
        {"python": ""},
        {"python": "3.1.0"},
        {"protocol": PROTOCOL_VERSION + 1},
        {"options": {"env": ["SECRET"]}},
        {"state": RunState.RUNNING, "kernel": ProcessId.own()},
    ],
)
def test_what_can_not_be_launched_again_says_so(make: Make, panel: PanelActions, fields: dict[str, Any]):
    directory = make(**fields)
    assert not _row(panel, directory).can_resume
    with pytest.raises(RunError, match="run calm-otter-41 can't be launched again: "):
        panel.resume(directory.run_id, "/")


@pytest.mark.parametrize("file", [PAYLOAD_FILE, TASK_FILE])
def test_a_payload_that_made_room_on_a_full_disk_is_gone(make: Make, panel: PanelActions, file: str):
    directory = make()
    (directory.path / file).unlink()
    assert not _row(panel, directory).can_resume
    with pytest.raises(RunError, match="its payload is gone"):
        panel.resume(directory.run_id, "/")


def test_the_values_of_env_are_known_to_the_kernel_that_launched_it(make: Make, panel: PanelActions, monkeypatch):
    directory = make(options={"env": ["SECRET"]})
    monkeypatch.setitem(run_files._env_by_run, directory.run_id, {"SECRET": "x"})
    assert _row(panel, directory).can_resume


def test_a_working_directory_that_is_gone_is_named(make: Make, panel: PanelActions, tmp_path: Path):
    directory = make()
    RankTask("cell", "x", "", "", 1, str(tmp_path / "gone"), [], []).write(directory.path)
    with pytest.raises(RunError, match=f"its working directory {tmp_path / 'gone'} is not there any more"):
        panel.resume(directory.run_id, "/")


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "cell"}'])
def test_a_task_of_another_version_is_refused(make: Make, panel: PanelActions, text: str):
    directory = make()
    (directory.path / TASK_FILE).write_text(text)
    with pytest.raises(RunError, match=r"its task.json can't be read"):
        panel.resume(directory.run_id, "/")


def test_a_checkpoint_that_is_gone_is_named(make: Make, panel: PanelActions):
    with pytest.raises(CheckpointError, match="/nowhere/step_1 is not there"):
        panel.resume(make().run_id, "/nowhere/step_1")


@pytest.mark.parametrize("action", ["stop", "resume", "log"])
def test_an_unknown_run_is_a_lookup_error(make: Make, panel: PanelActions, action: str):
    make("name")
    arguments = {"stop": (), "resume": ("/",), "log": (0, -1)}[action]
    for run_id in ("name", ""):
        with pytest.raises(LookupError, match="there is no run"):
            getattr(panel, action)(run_id, *arguments)


def test_names_count_on():
    first = RunRecord("1", "calm-otter-41", RunState.FINISHED, 1.0, 1, "cpu")
    assert next_name(first, set()) == "calm-otter-41-2"
    assert next_name(first, {"calm-otter-41-2"}) == "calm-otter-41-3"
    second = RunRecord("2", "calm-otter-41-2", RunState.FINISHED, 1.0, 1, "cpu", resumed_from="1")
    assert next_name(second, {"calm-otter-41-2"}) == "calm-otter-41-3"
    assert len(next_name(RunRecord("3", "x" * 120, RunState.FINISHED, 1.0, 1, "cpu"), set())) <= 120


# ----------------------------------------------------------------------------------------------------------------- log


def test_a_log_is_read_on_from_where_it_ended(make: Make, panel: PanelActions):
    own = ProcessId.own()
    directory = make(state=RunState.RUNNING, kernel=own, launcher=own)
    directory.rank_file(1, "out").write_text("one\n")
    assert panel.log(directory.run_id, 1, -1) == LogChunk(directory.run_id, 1, 0, 4, "one\n", is_end=False)
    assert panel.log(directory.run_id, 1, 4) == LogChunk(directory.run_id, 1, 4, 4, "", is_end=False)
    directory.rank_file(1, "out").write_text("one\ntwo\n")
    assert panel.log(directory.run_id, 1, 4).text == "two\n"
    assert panel.log(directory.run_id, 1, 0).text == "one\ntwo\n"
    directory.update_record(state=RunState.FINISHED)
    assert panel.log(directory.run_id, 1, 8) == LogChunk(directory.run_id, 1, 8, 8, "", is_end=True)


def test_what_another_panel_has_read_is_found_by_its_number(make: Make, panel: PanelActions):
    directory = make()
    directory.rank_file(0, "out").write_text("one\ntwo\n")
    directory.rank_file(0, "err").write_text("warning\n")
    directory.rank_file(0, "events").write_text('{"o": 4, "e": 0, "s": "stderr"}\n{"o": 4, "e": 8, "s": "stdout"}\n')
    assert panel.log(directory.run_id, 0, 0).text == "one\nwarning\ntwo\n"
    assert panel.log(directory.run_id, 0, 4).text == "warning\ntwo\n"
    assert panel.log(directory.run_id, 0, 12).text == "two\n"


def test_a_long_log_comes_in_pieces_of_64_kib(make: Make, panel: PanelActions):
    directory = make()
    whole = "".join(f"{number} é\n" for number in range(30_000))
    directory.rank_file(0, "out").write_text(whole)
    pieces = [panel.log(directory.run_id, 0, 0)]
    while not pieces[-1].is_end:
        pieces.append(panel.log(directory.run_id, 0, pieces[-1].next_offset))
    assert "".join(piece.text for piece in pieces) == whole
    assert all(len(piece.text.encode()) <= 1 << 16 for piece in pieces)


def test_a_log_ends_with_what_went_wrong(make: Make, panel: PanelActions):
    directory = make(state=RunState.KILLED, reason="%air stop")
    directory.rank_file(0, "out").write_text("no newline")
    assert panel.log(directory.run_id, 0, -1).text == "no newline\nKILLED: %air stop\n"


def test_a_run_that_moves_home_while_it_is_read(make: Make, panel: PanelActions, tmp_path: Path, monkeypatch):
    directory = make()
    directory.rank_file(0, "out").write_text("one\n")
    record = directory.read_record()
    here = tmp_path / "node" / directory.run_id
    shutil.copytree(directory.path, here)
    monkeypatch.setattr(panel._index, "find", lambda run_id: (RunDirectory(here), record))
    shutil.rmtree(here)
    assert panel.log(directory.run_id, 0, -1).text == "one\n"


def test_ranks_that_there_are_not(make: Make, panel: PanelActions):
    directory = make()
    for rank in (-1, 2):
        with pytest.raises(LookupError, match="has ranks 0 to 1"):
            panel.log(directory.run_id, rank, -1)


# --------------------------------------------------------------------------------------------------------------- record


def test_a_record_of_before_is_still_read(make: Make, panel: PanelActions):
    directory = make()
    values = json.loads((directory.path / "run.json").read_text())
    for field in ("notebook", "python", "protocol", "resumed_from"):
        del values[field]
    (directory.path / "run.json").write_text(json.dumps(values))
    assert not _row(panel, directory).can_resume
