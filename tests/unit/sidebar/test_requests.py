"""What a page may say. Anything else is a ValueError that says why, whatever it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_nb.monitor.presence import ViewState
from air_nb.sidebar.requests import (
    Log,
    Present,
    Refresh,
    Resume,
    Resync,
    SetInterval,
    Stop,
    Verify,
    parse_request,
    request_number,
)

_GOOD = {
    '{"type": "presence", "view": "v", "state": "idle"}': Present("v", ViewState.IDLE),
    '{"type": "refresh", "request": 3}': Refresh(),
    '{"type": "interval", "seconds": 30}': SetInterval(30.0),
    '{"type": "resync"}': Resync(),
    '{"type": "stop", "run_id": "r1"}': Stop("r1"),
    '{"type": "log", "run_id": "r1", "rank": 0, "offset": -1}': Log("r1", 0, -1),
    '{"type": "resume", "run_id": "r1", "path": "/ck/1"}': Resume("r1", "/ck/1"),
    '{"type": "verify", "path": "/ck/1"}': Verify("/ck/1"),
}

_BAD = {
    "null": "not NoneType",
    "[1]": "not list",
    "{}": "no message of the type 'None'",
    '{"type": ["stop"]}': "no message of the type",
    '{"type": "presence", "view": "v", "state": "asleep"}': "no state 'asleep'",
    '{"type": "presence", "state": "idle"}': "view is missing",
    '{"type": "interval", "seconds": 0.5}': "1 to 600 seconds, not 0.5",
    '{"type": "interval", "seconds": 601}': "1 to 600 seconds, not 601",
    '{"type": "interval", "seconds": NaN}': "a number of seconds",
    '{"type": "interval", "seconds": true}': "a number of seconds",
    '{"type": "stop", "run_id": 7}': "run_id is missing",
    '{"type": "stop", "run_id": ""}': "run_id is missing",
    '{"type": "verify", "path": "a\\u0000b"}': "path is missing",
    '{"type": "log", "run_id": "r1", "rank": -1, "offset": 0}': "rank is missing",
    '{"type": "log", "run_id": "r1", "rank": 0, "offset": -2}': "offset is missing",
    '{"type": "log", "run_id": "r1", "rank": 0, "offset": 1e300}': "offset is missing",
    '{"type": "log", "run_id": "r1", "rank": true, "offset": 0}': "rank is missing",
}


@pytest.mark.parametrize("text,request_", _GOOD.items(), ids=_GOOD)
def test_what_a_page_asks_for(text, request_):
    assert parse_request(json.loads(text)) == request_


@pytest.mark.parametrize("text,why", _BAD.items(), ids=_BAD)
def test_what_is_no_request_says_why(text, why):
    with pytest.raises(ValueError, match=why):
        parse_request(json.loads(text))


def test_texts_are_bounded():
    with pytest.raises(ValueError, match="view is missing"):
        parse_request({"type": "presence", "view": "v" * 201, "state": "active"})
    with pytest.raises(ValueError, match="no message of the type"):
        parse_request({"type": "x" * 10**6})


@pytest.mark.parametrize("number,found", [(3, 3), (True, None), ("3", None), (1.5, None), (2**60, None), (None, None)])
def test_only_a_number_is_the_number_of_a_request(number, found):
    assert request_number({"request": number}) == found


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
_KINDS = st.sampled_from(["presence", "refresh", "interval", "resync", "stop", "log", "resume", "verify"])
_FIELDS = st.sampled_from(["view", "state", "seconds", "run_id", "rank", "offset", "path", "request"])


@given(st.builds(lambda kind, rest: {**rest, "type": kind}, _KINDS, st.dictionaries(_FIELDS, _JSON)) | _JSON)
def test_garbage_is_refused_or_understood_but_nothing_else_happens(data):
    request_number(data)
    try:
        parse_request(data)
    except ValueError as error:
        assert len(str(error)) < 200  # noqa: PT017 - it need not be raised
