"""What a page hears, in which order and how often; what its requests do; how it is forgotten."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from air_nb.errors import LauncherError
from air_nb.monitor.presence import ViewState
from air_nb.sidebar.rows import RootRows
from tests.support.wait import eventually
from tests.unit.sidebar.conftest import checkpoint_row, run_row, snapshot


def _is_settled(page) -> bool:
    return {"runs", "checkpoints"} <= set(page.kinds())


@pytest.fixture
def settled(page):
    """A page that looks, and has heard all there is to hear at first."""
    page.say(type="presence", view="v", state="active")
    assert eventually(lambda: _is_settled(page))
    return page


# ------------------------------------------------------------------------------------------------------------- numbers


def test_a_page_is_greeted_and_then_told_what_had_to_be_read(page):
    assert eventually(lambda: _is_settled(page))

    assert page.kinds()[:3] == ["hello", "history", "status"]
    hello = {"kernel_id": "k1", "pid": 42, "host": "host", "version": "0.1", "interval_s": 10.0, "idle_s": 300.0}
    assert page.heard[0] == {"type": "hello", "seq": 0, **hello, "window_s": 7200.0, "points": 720}
    assert [each["seq"] for each in page.heard] == list(range(5))


def test_numbers_rise_by_one_whichever_threads_send(hub, settled):
    threads = [
        threading.Thread(target=lambda base=base: [hub.on_sample(snapshot(base + n)) for n in range(50)])
        for base in range(0, 400, 100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert [each["seq"] for each in settled.heard] == list(range(len(settled.heard)))
    assert settled.kinds().count("sample") == 200


def test_after_a_gap_the_page_is_told_everything_again_from_number_0(hub, poller, settled):
    poller.latest = snapshot(100)
    hub.on_sample(poller.latest)
    before = len(settled.heard)

    settled.say(type="resync", request=5)

    again = settled.heard[before:]
    assert [each["seq"] for each in again] == list(range(len(again)))
    expected = ["hello", "devices", "history", "sample", "processes", "runs", "checkpoints", "status"]
    assert sorted([each["type"] for each in again][:8]) == sorted(expected)
    assert settled.last("reply")["ok"]


def test_each_page_has_its_own_numbers(hub, settled, open_page):
    hub.on_sample(snapshot())
    second = open_page()

    assert second.heard[0]["seq"] == 0
    assert [each["seq"] for each in settled.heard] == list(range(len(settled.heard)))


# ------------------------------------------------------------------------------------------------------ only on change


def test_a_state_is_pushed_only_when_it_has_changed_and_samples_always(hub, settled):
    for second in (100, 110, 120):
        hub.on_sample(snapshot(second))

    assert [settled.kinds().count(kind) for kind in ("sample", "devices", "processes")] == [3, 1, 1]

    hub.on_sample(replace(snapshot(130), holders={}))

    assert [settled.kinds().count(kind) for kind in ("sample", "devices", "processes")] == [4, 1, 2]


def test_rows_are_pushed_only_when_they_have_changed(actions, settled):
    before = settled.kinds().count("runs")
    settled.say(type="refresh")
    actions.run_rows = [run_row(state="KILLED")]
    settled.say(type="refresh")
    assert eventually(lambda: settled.last("runs")["runs"][0]["state"] == "KILLED")

    assert settled.kinds().count("runs") == before + 1
    assert settled.kinds().count("checkpoints") == 1


def test_a_run_of_this_kernel_is_shown_at_once(hub, actions, settled):
    actions.run_rows = [run_row(run_id="new", is_live=True, state="STARTING"), run_row()]

    hub.runs_changed()

    assert eventually(lambda: settled.last("runs")["runs"][0]["run_id"] == "new")


def test_while_a_run_is_live_its_last_line_follows_without_anybody_asking(hub, actions, settled, monkeypatch):
    monkeypatch.setattr("air_nb.sidebar.hub._LIVE_PERIOD_S", 0.05)
    hub.runs_changed()

    def has_shown(line: str) -> bool:
        return bool(settled.last("runs")["runs"][0]["line"] == line)

    for line in ("step 1", "step 2", "step 3", "step 4"):
        actions.run_rows = [run_row(is_live=True, state="RUNNING", line=line)]
        assert eventually(partial(has_shown, line))


def test_rows_that_cannot_be_read_stay_and_say_why(actions, settled):
    actions.failure = PermissionError("runs: permission denied")
    settled.say(type="refresh")
    assert eventually(lambda: settled.last("runs")["problem"])

    message = settled.last("runs")
    assert message["problem"] == "PermissionError: runs: permission denied"
    assert message["runs"][0]["run_id"] == "r1"

    actions.failure = None
    settled.say(type="refresh")
    assert eventually(lambda: not settled.last("runs")["problem"])


# -------------------------------------------------------------------------------------------------- pages come and go


def test_a_page_that_falls_silent_gets_nothing_until_it_is_heard_again(hub, poller, clock, settled):
    clock.now += 299
    hub.on_sample(snapshot(100))
    heard = len(settled.heard)
    clock.now += 1
    hub.on_sample(snapshot(110))
    assert len(settled.heard) == heard

    poller.latest = snapshot(120)
    settled.say(type="presence", view="v", state="active")

    again = settled.heard[heard:]
    assert [each["seq"] for each in again] == list(range(len(again)))
    assert again[0]["type"] == "hello"
    assert settled.last("sample")["at"] == 120


def test_what_a_hidden_page_says_does_not_wake_it(hub, clock, settled):
    clock.now += 301
    hub.on_sample(snapshot(100))
    heard = len(settled.heard)

    settled.say(type="presence", view="v", state="hidden")

    assert len(settled.heard) == heard


def test_a_page_whose_views_are_all_gone_gets_nothing(hub, settled):
    settled.say(type="presence", view="w", state="hidden")
    settled.say(type="presence", view="v", state="gone")
    hub.on_sample(snapshot(100))
    assert settled.last("sample")["at"] == 100

    settled.say(type="presence", view="w", state="gone")
    hub.on_sample(snapshot(110))

    assert settled.last("sample")["at"] == 100


def test_a_page_that_can_not_be_reached_is_dropped_and_the_others_go_on(hub, settled, open_page):
    other = open_page()
    settled.is_broken = True

    hub.on_sample(snapshot(100))
    hub.on_sample(snapshot(110))

    assert not settled.connection.is_open
    assert other.last("sample")["at"] == 110


def test_the_views_of_a_page_that_has_gone_without_a_word_are_gone_at_the_next_sample(hub, poller):
    is_there = True
    connection = hub.connect(lambda message: None, lambda: None, lambda: is_there)
    hub.receive(connection, {"type": "presence", "view": "v", "state": "active"})
    hub.on_sample(snapshot())
    assert poller.views == {"v": ViewState.ACTIVE}
    is_there = False
    assert not hub.is_in_sight()
    hub.on_sample(snapshot())
    assert poller.views == {"v": ViewState.GONE}


def test_a_page_that_has_gone_without_a_word_is_forgotten_by_the_kernel_too(hub):
    forgotten: list[bool] = []
    is_there = True
    connection = hub.connect(lambda message: None, lambda: None, lambda: is_there, lambda: forgotten.append(True))
    hub.on_sample(snapshot())
    assert not forgotten
    is_there = False
    hub.on_sample(snapshot())
    hub.on_sample(snapshot())
    assert forgotten == [True]
    hub.receive(connection, {"type": "resync"})
    assert not connection.is_open


def test_a_page_that_could_not_be_sent_to_is_greeted_when_it_is_heard_again(hub, settled):
    settled.is_broken = True
    hub.on_sample(snapshot(100))
    hub.on_sample(snapshot(110))
    settled.is_broken = False
    settled.heard.clear()
    settled.say(type="presence", view="v", state="active")
    assert settled.kinds()[0] == "hello"
    hub.on_sample(snapshot(120))
    assert settled.last("sample")["at"] == 120
    hub.close()
    settled.heard.clear()
    settled.say(type="resync")
    assert settled.heard == []


def test_the_views_of_a_page_that_hangs_up_are_gone(hub, poller, settled):
    hub.disconnect(settled.connection)

    assert poller.views == {"v": ViewState.GONE}
    assert not settled.is_hung_up


def test_of_too_many_pages_the_one_that_was_silent_longest_goes(clock, open_page):
    pages = []
    for _ in range(32):
        clock.now += 1
        pages.append(open_page())
    clock.now += 1
    pages[0].say(type="presence", view="v", state="active")

    open_page()

    assert [page.is_hung_up for page in pages] == [False, True] + [False] * 30


def test_views_of_one_page_are_bounded(settled):
    for number in range(100):
        settled.say(type="presence", view=f"v{number}", state="active")

    assert len(settled.connection.views) == 16


def test_closing_hangs_up_on_all_pages_and_ends_what_was_started(hub, actions, settled, open_page):
    other = open_page()

    hub.close()

    assert settled.is_hung_up
    assert other.is_hung_up
    assert ("close",) in actions.calls
    assert open_page().is_hung_up


def test_whether_a_page_shows_the_panel(hub, clock, page):
    assert not hub.is_in_sight()
    page.say(type="presence", view="v", state="idle")
    assert hub.is_in_sight()
    clock.now += 301
    assert not hub.is_in_sight()


def test_threads_that_read_rows_end_when_nobody_looks(actions, settled):
    actions.run_rows = [run_row(is_live=True)]
    settled.say(type="refresh")

    settled.say(type="presence", view="v", state="hidden")
    settled.say(type="refresh")

    def names() -> str:
        return " ".join(each.name for each in threading.enumerate())

    assert eventually(lambda: "air_nb-panel" not in names())


# ------------------------------------------------------------------------------------------------------------ requests


def test_a_slow_request_holds_up_nothing_else(hub, actions, settled):
    actions.gate.clear()
    settled.say(type="stop", run_id="r1", request=1)

    settled.say(type="refresh", request=2)
    settled.say(type="interval", seconds=20, request=3)

    assert [each["request"] for each in settled.heard if each["type"] == "reply"] == [2, 3]
    actions.gate.set()
    assert eventually(lambda: settled.last("reply")["request"] == 1)
    assert settled.last("reply") | {"seq": 0} == {
        "type": "reply",
        "seq": 0,
        "request": 1,
        "ok": True,
        "text": "run r1 was stopped",
    }


@pytest.mark.parametrize(
    "message,call,text",
    [
        ({"type": "resume", "run_id": "r1", "path": "/ck/1"}, ("resume", "r1", "/ck/1"), "r2"),
        ({"type": "verify", "path": "/ck/1"}, ("verify", "/ck/1"), "/ck/1 is good"),
        ({"type": "log", "run_id": "r1", "rank": 3, "offset": 9}, ("log", "r1", 3, 9), ""),
    ],
)
def test_requests_are_handed_on_and_answered(actions, settled, message, call, text):
    settled.say(**message, request=4)
    assert eventually(lambda: "reply" in settled.kinds())

    assert call in actions.calls
    assert (settled.last("reply")["ok"], settled.last("reply")["text"]) == (True, text)


@pytest.mark.parametrize(
    "failure,text",
    [
        (LookupError("there is no run r1"), "there is no run r1"),
        (KeyError("there is no run r1"), "there is no run r1"),
        (LauncherError("the disk is full"), "the disk is full"),
        (OSError(5, "Input/output error"), "[Errno 5] Input/output error"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
def test_a_request_that_fails_says_why(actions, settled, failure, text):
    actions.failure = failure
    settled.say(type="stop", run_id="r1", request=1)
    assert eventually(lambda: "reply" in settled.kinds())

    assert (settled.last("reply")["ok"], settled.last("reply")["text"]) == (False, text)


def test_slow_requests_are_bounded(actions, settled):
    actions.gate.clear()
    for number in range(9):
        settled.say(type="verify", path=f"/ck/{number}", request=number)

    reply = settled.last("reply")
    assert (reply["request"], reply["ok"], reply["text"][:8]) == (8, False, "too much")
    actions.gate.set()
    assert eventually(lambda: settled.kinds().count("reply") == 9)
    settled.say(type="verify", path="/ck/9", request=9)
    assert eventually(lambda: settled.last("reply")["request"] == 9)
    assert settled.last("reply")["ok"]


def test_a_log_that_does_not_come_holds_up_nothing_else(actions, settled):
    actions.gate.clear()
    for _ in range(20):
        settled.say(type="log", run_id="r1", rank=0, offset=0)
    settled.say(type="refresh", request=1)
    assert settled.last("reply")["request"] == 1
    settled.say(type="stop", run_id="r1", request=2)
    assert eventually(lambda: ("stop", "r1") in actions.calls)
    actions.gate.set()
    assert eventually(lambda: settled.last("reply")["request"] == 2)


def test_the_tables_take_a_shorter_interval_at_once(actions, poller, settled):
    poller.interval_s = 600.0
    actions.run_rows = [run_row(run_id="old")]
    settled.say(type="refresh")
    assert eventually(lambda: settled.last("runs")["runs"][0]["run_id"] == "old")
    time.sleep(0.2)  # for fetches that are under way
    actions.run_rows = [run_row(run_id="new")]
    assert not eventually(lambda: settled.last("runs")["runs"][0]["run_id"] == "new", 0.3)
    settled.say(type="interval", seconds=1.0)
    assert eventually(lambda: settled.last("runs")["runs"][0]["run_id"] == "new")


def test_the_interval_is_set_and_told(poller, settled, open_page):
    other = open_page()

    settled.say(type="interval", seconds=60, request=1)

    assert poller.interval_s == 60
    assert [each.last("status")["interval_s"] for each in (settled, other)] == [60, 60]


def test_refresh_samples_now(poller, settled):
    settled.say(type="refresh", request=1)

    assert poller.refreshed == 1


@pytest.mark.parametrize("data", [None, [], "stop", {"type": "stop"}, {"type": 3}, {"request": []}, {"type": "log"}])
def test_garbage_without_a_number_is_ignored(hub, settled, data):
    heard = len(settled.heard)

    hub.receive(settled.connection, data)

    assert len(settled.heard) == heard


def test_garbage_with_a_number_is_answered(settled):
    settled.say(type="explode", request=1)

    assert not settled.last("reply")["ok"]
    assert "'explode'" in settled.last("reply")["text"]


def test_a_forked_child_has_no_pages(hub, settled):
    settled.say(type="presence", view="v", state="hidden")
    settled.say(type="refresh")  # the threads look up, and end
    assert eventually(lambda: not any(thread.name.startswith("air_nb-panel") for thread in threading.enumerate()))
    heard = len(settled.heard)

    hub.abandon()
    hub.on_sample(snapshot(100))
    hub.runs_changed()
    settled.say(type="refresh", request=1)

    assert len(settled.heard) == heard
    assert not settled.is_hung_up


def test_checkpoints_change_with_the_interval(actions, poller, settled):
    poller.interval_s = 0.01
    settled.say(type="refresh")
    actions.root_rows = [RootRows("/ck", "", (checkpoint_row(step=2), checkpoint_row()))]

    assert eventually(lambda: len(settled.last("checkpoints")["roots"][0]["checkpoints"]) == 2)
