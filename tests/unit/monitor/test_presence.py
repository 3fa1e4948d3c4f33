import pytest

from air_nb.monitor.presence import Presence, ViewState

IDLE_S = 300.0
ACTIVE, HIDDEN, IDLE, GONE = ViewState.ACTIVE, ViewState.HIDDEN, ViewState.IDLE, ViewState.GONE


@pytest.fixture
def presence():
    return Presence(IDLE_S)


def test_nobody_looks_at_first(presence):
    assert not presence.wants(0)
    assert presence.why_not(0) == "no page shows the panel"


@pytest.mark.parametrize(
    "state, why",
    [
        (HIDDEN, "the panel is out of sight"),
        (IDLE, "nobody has touched the page for 300 s"),
        (GONE, "no page shows the panel"),
    ],
)
def test_a_view_is_wanted_while_it_is_active(presence, state, why):
    presence.tell("a", ACTIVE, 0)
    assert (presence.wants(1), presence.why_not(1)) == (True, "")
    presence.tell("a", state, 2)
    assert (presence.wants(2), presence.why_not(2)) == (False, why)
    presence.tell("a", ACTIVE, 3)
    assert presence.wants(3)


def test_one_active_view_of_several_is_enough(presence):
    presence.tell("a", HIDDEN, 0)
    presence.tell("b", ACTIVE, 0)
    presence.tell("c", GONE, 0)
    assert presence.wants(1)
    assert set(presence._views) == {"a", "b"}


def test_a_silent_view_counts_as_gone_after_the_idle_time(presence):
    presence.tell("a", ACTIVE, 0)
    presence.tell("a", ACTIVE, 200)
    assert presence.wants(499)
    assert not presence.wants(500)
    assert presence.why_not(500) == "no page shows the panel"


def test_a_short_idle_time_does_not_outrun_the_timers_of_a_tab_in_the_background():
    presence = Presence(8.0)
    presence.tell("a", ACTIVE, 0)
    assert presence.wants(29)
    assert not presence.wants(30)


def test_only_becoming_active_asks_for_fresh_values(presence):
    told = [presence.tell("a", state, now) for now, state in enumerate([HIDDEN, ACTIVE, ACTIVE, IDLE, ACTIVE])]
    assert told == [False, True, False, False, True]
    assert presence.tell("a", ACTIVE, 1000)  # it was silent for so long that polling had paused


def test_views_that_go_without_a_word_do_not_accumulate(presence):
    for number in range(10_000):
        presence.tell(f"view-{number}", ACTIVE, number)
    assert len(presence._views) < 100
    assert presence.wants(10_000)
    presence.tell("view-9999", GONE, 10_000)
    presence.tell("view-9998", ACTIVE, 10_000)
    assert presence.wants(10_200)
