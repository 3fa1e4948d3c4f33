"""The record of a run survives its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from air_nb.protocol.messages import RunState
from air_nb.runs.directory import RunDirectory, RunRecord
from air_nb.runs.liveness import ProcessId


def _record(**fields: object) -> RunRecord:
    values = {"run_id": "1", "name": "x", "state": RunState.RUNNING, "created_at": 1.5, "nproc": 2, "device": "cpu"}
    return RunRecord(**(values | fields))  # type: ignore[arg-type]


def test_a_record_is_read_as_it_was_written(tmp_path: Path):
    own = ProcessId.own()
    record = _record(kernel=own, launcher=own, ranks=[own, None], failures=[{"rank": 1}])
    directory = RunDirectory(tmp_path)
    directory.write_record(record)
    assert directory.read_record() == record
    assert directory.read_record().is_live


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"state": "RUNNING"}', '{"state": "ODD"}'])
def test_what_is_no_record_is_a_value_error_that_names_the_file(tmp_path: Path, text: str):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match="is not the record of a run"):
        RunDirectory(tmp_path).read_record()


def test_a_run_whose_owner_is_gone_is_not_live():
    own = ProcessId.own()
    assert not _record(kernel=ProcessId(own.pid, own.started_ticks - 1)).is_live
    assert not _record(kernel=own, state=RunState.FAILED).is_live
    assert not _record().is_live
