"""What the kernel sends: field by field as the page reads it, and never more than the Jupyter server lets through."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from datetime import UTC, datetime

from air_nb.monitor.gpu_report import DriverState, GpuReport, GpuSample, GpuState
from air_nb.monitor.history import History
from air_nb.monitor.host import HostSample
from air_nb.sidebar import messages
from air_nb.sidebar.rows import CheckpointRow, Link, LogChunk, RootRows, RunRow
from tests.unit.sidebar.conftest import checkpoint_row, run_row, snapshot


def test_a_run_has_the_fields_that_the_page_reads():
    row = run_row(link=Link("https://mlflow/x", "MLflow", "https://mlflow/x"))

    sent = messages.runs([row])["runs"][0]

    assert set(sent) == {field.name for field in fields(RunRow)}
    assert sent["link"] == {"href": "https://mlflow/x", "label": "MLflow", "text": "https://mlflow/x"}


def test_live_runs_are_sent_in_any_case_and_the_rest_is_counted():
    rows = [run_row(run_id=str(number)) for number in range(70)]
    rows[-1] = replace(rows[-1], is_live=True)

    message = messages.runs(rows)

    assert [row["run_id"] for row in message["runs"]] == [*map(str, range(49)), "69"]
    assert message["more"] == 20


def test_checkpoints_beyond_a_hundred_are_counted():
    rows = tuple(checkpoint_row(step=step) for step in range(130))

    root = messages.checkpoints([RootRows("/ck", "", rows, more=7)])["roots"][0]

    assert set(root["checkpoints"][0]) == {field.name for field in fields(CheckpointRow)}
    assert (len(root["checkpoints"]), root["more"]) == (100, 37)


def test_no_message_is_larger_than_what_the_server_lets_through():
    path = "/" + "ü" * 4000
    roots = [RootRows(f"/ck{n}", "x" * 9000, tuple([checkpoint_row(path=path)] * 100)) for n in range(200)]
    rows = [run_row(line="x" * 100_000, reason="ü" * 100_000, name="n" * 100_000)] * 200
    ring = History()
    gpus = tuple(GpuSample(index=n, uuid=f"GPU-{n:036}", utilization_percent=1) for n in range(64))
    for second in range(720):
        at = datetime.fromtimestamp(second * 10, UTC)
        ring.add(GpuReport(at, DriverState.OK, gpus=gpus), HostSample(at))

    built = [messages.checkpoints(roots), messages.runs(rows, "p" * 9000), messages.history(ring.as_base64())]

    sizes = [len(json.dumps(message)) for message in built]
    assert max(sizes) <= messages.LARGEST_BYTES
    assert min(sizes) > 50_000  # they are not empty either


def test_a_sample_of_a_driver_that_did_not_answer_says_how_old_it_is():
    seen = snapshot(at=100.0)
    report = replace(seen.report, driver_state=DriverState.TIMEOUT, at=datetime.fromtimestamp(58, UTC))

    assert messages.sample(replace(seen, report=report))["stale_s"] == 42.0
    assert messages.sample(seen)["stale_s"] is None


def test_unknown_values_and_a_lost_gpu_are_sent_as_such():
    gpu = GpuSample(index=3, state=GpuState.LOST, reason="fell off the bus")
    seen = snapshot()
    seen = replace(seen, report=replace(seen.report, gpus=(gpu,)))

    card = messages.sample(seen)["gpus"][0]

    assert card == {
        "uuid": "index-3",
        "state": "lost",
        "reason": "fell off the bus",
        "utilization_percent": None,
        "memory_used_bytes": None,
        "temperature_celsius": None,
        "power_watts": None,
    }
    assert messages.devices(seen.report, seen.host)["gpus"][0]["uuid"] == "index-3"


def test_who_holds_memory():
    seen = snapshot()

    process = messages.processes(seen.report, seen.holders)["gpus"][0]["processes"][0]
    stranger = messages.processes(seen.report, {})["gpus"][0]["processes"][0]

    label = "rank 0 of swift-otter"
    assert process == {"pid": 7, "used_bytes": 1, "kind": "rank", "label": label, "run_id": "r1", "rank": 0}
    assert (stranger["kind"], stranger["label"]) == ("stranger", "pid 7")


def test_a_log_says_where_the_next_piece_begins():
    sent = messages.log(LogChunk("r1", 0, 10, 15, "hello", is_end=False))

    expected = {"run_id": "r1", "rank": 0, "offset": 10, "next_offset": 15, "text": "hello", "is_end": False}
    assert sent == {"type": "log", **expected}


def test_every_message_is_json():
    seen = snapshot(utilization=None)
    built = [messages.devices(seen.report, seen.host), messages.sample(seen), messages.runs([run_row()])]

    assert json.loads(json.dumps(built, allow_nan=False)) == built
