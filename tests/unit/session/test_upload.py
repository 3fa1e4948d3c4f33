import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from air_nb.protocol.tracking import TRACKED_FILE, TrackedRun, TrackedState
from air_nb.runs.directory import RunDirectory
from air_nb.runs.liveness import ProcessId
from air_nb.session.upload import close_left_open
from tests.support.tracked_runs import LaunchedRun

URI = "http://tracking:5000"
DEAD = ProcessId(2**22 - 1, 1)


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("AIR_NB_HOME", str(tmp_path / "home"))


def ended_run(tmp_path, tracked=None, *, kernel=DEAD):
    run = LaunchedRun(URI, tmp_path, kernel=kernel)
    run.close_record()
    if tracked is not None:
        RunDirectory(run.path).write_private(TRACKED_FILE, tracked.encode())
    return run


def left_open():
    """Ids of the runs that a new kernel goes after by itself."""
    found: list[str] = []
    tracking = SimpleNamespace(finish=lambda paths, *_: found.extend(path.name for path in paths))
    close_left_open(cast("Any", SimpleNamespace(tracking=tracking)))
    return found


@pytest.mark.parametrize(
    "tracked",
    [None, TrackedRun(TrackedState.PENDING, URI), TrackedRun(TrackedState.OPEN, URI, "a" * 32, problem="silent.")],
)
def test_what_a_kernel_that_has_ended_had_no_time_to_send_is_sent_by_the_next(tmp_path, tracked):
    run = ended_run(tmp_path, tracked)
    assert left_open() == [run.run_id]


@pytest.mark.parametrize(
    "tracked", [TrackedRun(TrackedState.ENDED, URI, "a" * 32), TrackedRun(TrackedState.PENDING, URI, problem="silent.")]
)
def test_what_is_complete_or_was_never_taken_waits_for_the_user(tmp_path, tracked):
    ended_run(tmp_path, tracked)
    assert left_open() == []


def test_another_kernel_that_lives_sends_its_runs_itself(tmp_path):
    ended_run(tmp_path, kernel=ProcessId.of(os.getpid()))
    assert left_open() == []


def test_runs_that_were_not_tracked_are_left_alone(tmp_path):
    run = ended_run(tmp_path)
    (run.path / "tracking.json").unlink()
    assert left_open() == []
