import time

import pytest

from air_nb.protocol.messages import RunState
from air_nb.protocol.tracking import REQUEST_FILE, TRACKED_FILE, TrackedRun, TrackedState, TrackingRequest
from air_nb.runs.directory import RunDirectory, RunRecord, all_runs
from air_nb.runs.retention import prune

DAY_S = 24 * 3600.0


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("AIR_NB_HOME", str(tmp_path))


def ended_run(*, age_s=0.0, tracked=None):
    directory = RunDirectory.create()
    directory.write_record(
        RunRecord(directory.run_id, "calm-otter-41", RunState.FINISHED, time.time() - age_s, nproc=1, device="cpu")
    )
    if tracked is not None:
        directory.write_private(REQUEST_FILE, TrackingRequest("calm-otter-41", "http://gone:5000").encode())
        directory.write_private(TRACKED_FILE, TrackedRun(tracked, "http://gone:5000").encode())
    return directory.run_id


def test_the_oldest_runs_go_first():
    runs = [ended_run(age_s=age) for age in (30.0, 20.0, 10.0)]
    assert prune(max_runs=1) == [runs[1], runs[0]]


def test_what_mlflow_has_not_been_told_is_kept_beyond_the_limits_but_for_age():
    unsent = ended_run(age_s=40.0, tracked=TrackedState.OPEN)
    never_made = ended_run(age_s=50.0, tracked=TrackedState.PENDING)
    sent = ended_run(age_s=60.0, tracked=TrackedState.ENDED)
    old = ended_run(age_s=31 * DAY_S, tracked=TrackedState.OPEN)
    newest = ended_run()
    assert set(prune(max_runs=1, max_bytes=0)) == {sent, old, newest}
    assert {record.run_id for _, record in all_runs()} == {unsent, never_made}
