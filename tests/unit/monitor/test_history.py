import base64
import gc
import math
import tracemalloc
from array import array
from datetime import UTC, datetime, timedelta

import pytest

from air_nb.monitor.gpu_report import DriverState, GpuReport, GpuSample, GpuState
from air_nb.monitor.history import History
from air_nb.monitor.host import HostSample

START = datetime(2026, 11, 29, 16, 0, tzinfo=UTC)
NAN = pytest.approx(math.nan, nan_ok=True)


def at(seconds):
    return START + timedelta(seconds=seconds)


def gpu(uuid, utilization=50, **fields):
    values = {"memory_used_bytes": 20, "memory_total_bytes": 80, "temperature_celsius": 64, "power_watts": 312.5}
    return GpuSample(0, uuid, "H100", utilization_percent=utilization, **{**values, **fields})


def report(seconds, *gpus, state=DriverState.OK):
    return GpuReport(at(seconds), state, gpus=gpus)


def host(seconds, cpu_percent=25.0):
    return HostSample(at(seconds), cpu_percent, memory_used_bytes=3, memory_total_bytes=4)


def add(history, seconds, *gpus):
    history.add(report(seconds, *gpus), host(seconds))


def decode(text, code="f"):
    return array(code, base64.b64decode(text)).tolist()


def times(history, **since):
    return [seconds - START.timestamp() for seconds in decode(history.as_base64(**since)["at"], "d")]


def utilization(history):
    return {each["uuid"]: decode(each["utilization_percent"]) for each in history.as_base64()["gpus"]}


def test_the_message_has_every_column_of_every_gpu_and_of_the_machine():
    history = History()
    add(history, 0, gpu("GPU-a"), gpu("GPU-b", None, power_watts=None, memory_total_bytes=None))
    message = history.as_base64()
    assert set(message) == {"at", "gpus", "host"}
    assert decode(message["at"], "d") == [START.timestamp()]
    a, b = ({name: text if name == "uuid" else decode(text) for name, text in gpu.items()} for gpu in message["gpus"])
    assert a == {
        "uuid": "GPU-a",
        "utilization_percent": [50],
        "memory_percent": [25],
        "temperature_celsius": [64],
        "power_watts": [312.5],
    }
    unknown = (*b["utilization_percent"], *b["memory_percent"], *b["power_watts"])
    assert unknown == (NAN, NAN, NAN)
    assert {name: decode(text) for name, text in message["host"].items()} == {
        "cpu_percent": [25],
        "memory_percent": [75],
    }


def test_an_empty_history_is_a_message_too():
    assert History().as_base64() == {"at": "", "gpus": [], "host": {"cpu_percent": "", "memory_percent": ""}}


def test_gpus_that_appear_later_disappear_or_are_lost_leave_gaps():
    history = History()
    add(history, 0, gpu("GPU-a", 1))
    add(history, 10, gpu("GPU-a", 2), gpu("GPU-b", 3), gpu(None, 4))
    add(history, 20, gpu("GPU-b", 5), gpu("GPU-a", 6, state=GpuState.LOST))
    add(history, 30, gpu("GPU-b", 7))
    assert utilization(history) == {"GPU-a": [1, 2, NAN, NAN], "GPU-b": [NAN, 3, 5, 7]}


@pytest.mark.parametrize("state", [DriverState.TIMEOUT, DriverState.ERROR, DriverState.OK])
def test_a_sample_that_is_told_again_is_a_gap_and_the_machine_goes_on(state):
    history = History()
    add(history, 0, gpu("GPU-a", 9))
    history.add(report(0, gpu("GPU-a", 9), state=state), host(10, 50.0))
    add(history, 20, gpu("GPU-a", 8))
    assert utilization(history) == {"GPU-a": [9, NAN, 8]}
    assert decode(history.as_base64()["host"]["cpu_percent"]) == [25, 50, 25]


def test_the_oldest_rows_give_way_and_no_old_value_shines_through():
    history = History(points=4, window_s=1000)
    for number in range(6):
        add(history, 300 * number, gpu("GPU-a", number), *([gpu("GPU-b", 90)] if number == 1 else []))
    assert times(history) == [600, 900, 1200, 1500]
    assert utilization(history) == {"GPU-a": [2, 3, 4, 5]}
    assert len(history) == 4


def test_a_gpu_that_is_away_when_the_ring_comes_round_has_a_gap_there():
    history = History(points=4, window_s=1000)
    for number in range(6):
        add(history, 200 * number, *([gpu("GPU-b", number)] if number in (1, 4) else []))
    assert utilization(history) == {"GPU-b": [NAN, NAN, 4, NAN]}


def test_a_sample_that_was_old_before_the_first_row_is_not_drawn_as_a_new_one():
    history = History()
    history.add(report(-50, gpu("GPU-a", 9), state=DriverState.TIMEOUT), host(0))
    assert utilization(history) == {}


def test_rows_older_than_the_window_leave():
    history = History()
    for seconds in (0, 10, 7195, 7200, 7210, 20000):
        add(history, seconds)
        assert all(seconds - each < 7200 for each in times(history))
    assert times(history) == [20000]


def test_only_the_rows_since_a_time_can_be_asked_for():
    history = History()
    for seconds in (0, 10, 20):
        add(history, seconds, gpu("GPU-a", seconds))
    message = history.as_base64(since=at(10).timestamp())
    assert decode(message["at"], "d") == [at(20).timestamp()]
    assert decode(message["gpus"][0]["utilization_percent"]) == [20]


@pytest.mark.parametrize("interval_s", [1, 2, 5])
def test_polled_more_often_it_still_holds_nearly_two_hours_and_the_newest_row(interval_s):
    history = History()
    for seconds in range(0, 4 * 3600, interval_s):
        add(history, seconds, gpu("GPU-a", seconds % 100))
    rows = times(history)
    assert rows[-1] == seconds
    assert rows[-1] - rows[0] > 5400
    assert utilization(history)["GPU-a"][-1] == seconds % 100
    assert rows == sorted(set(rows))


def test_after_the_clock_was_set_back_the_future_leaves():
    history = History()
    for seconds in (0, 10, 3600, 3610, 15):
        add(history, seconds, gpu("GPU-a", seconds % 100))
    assert times(history) == [0, 10, 15]
    assert utilization(history) == {"GPU-a": [0, 10, 15]}


def test_a_day_of_polling_needs_no_more_memory_than_three_hours():
    history = History()
    uuids = [f"GPU-{number}" for number in range(8)]

    def poll(hours):
        for seconds in range(hours[0] * 3600, hours[1] * 3600, 10):
            add(history, seconds, *(gpu(uuid, seconds % 100) for uuid in uuids))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        after_3_h = poll((0, 3))
        after_24_h = poll((3, 24))
    finally:
        tracemalloc.stop()
    assert after_24_h - after_3_h < 2000  # one row of floats more an hour would be 30 kB
    assert after_24_h < 1_000_000
    assert len(history) == 720


def test_gpus_that_come_and_go_do_not_accumulate():
    history = History()
    for number in range(2000):
        add(history, number * 10, gpu(f"GPU-{number}"), gpu("GPU-stays", number % 100))
    assert len(history._gpus) <= 64
    assert utilization(history)["GPU-stays"][-2:] == [98, 99]
    for number in range(2000, 2800):
        add(history, number * 10, gpu("GPU-stays"))
    assert list(utilization(history)) == ["GPU-stays"]
