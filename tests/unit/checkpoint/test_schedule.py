"""When a checkpoint is due."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_nb.checkpoint.schedule import Every, Pace, Schedule, optimal_interval_s

_DAY_S = 86400.0


def schedule(every, now_s=0.0, mtbf_s=_DAY_S):
    return Schedule(Every.parse(every), mtbf_s=mtbf_s, now_s=now_s)


@pytest.mark.parametrize(
    "text,seconds",
    [("10min", 600), ("90s", 90), ("90 s", 90), ("2h", 7200), ("1.5h", 5400), ("5m", 300), ("1d", 86400), ("3sec", 3)],
)
def test_times_are_read(text, seconds):
    assert Every.parse(text) == Every(seconds=seconds)


def test_numbers_are_steps_and_none_is_never():
    assert Every.parse(500) == Every(steps=500)
    assert Every.parse("auto") == Every(auto=True)
    assert not any(schedule(None).due_by_step(step) or schedule(None).due_by_time(1e9) for step in range(1, 50))


@pytest.mark.parametrize("value", [0, -3, "", "soon", "10", "10 minutes", "-5s", "0s", "min"])
def test_what_is_no_interval_is_refused_with_examples(value):
    with pytest.raises(ValueError) as caught:
        Every.parse(value)
    assert repr(value) in str(caught.value)
    assert "10min" in str(caught.value)


@pytest.mark.parametrize("value", [True, 1.5, [500]])
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match="every="):
        Every.parse(value)


def test_a_mean_time_between_failures_is_positive():
    with pytest.raises(ValueError, match="mtbf_s=0"):
        schedule("auto", mtbf_s=0)


def test_steps_are_due_at_multiples():
    assert [step for step in range(1, 12) if schedule(4).due_by_step(step)] == [4, 8]


def test_time_counts_from_when_the_last_save_began():
    by_time = schedule("10s", now_s=100.0)
    assert not by_time.due_by_time(109.9)
    assert by_time.due_by_time(110.0)
    by_time.began(112.0)
    assert not by_time.due_by_time(121.9)
    assert by_time.due_by_time(122.0)


def test_auto_measures_one_save_first_and_then_follows_the_cost():
    auto = schedule("auto")
    first_s = auto.interval_s
    auto.measured(stall_s=0.5, seconds=3.0)
    assert auto.interval_s == pytest.approx(optimal_interval_s(0.5, _DAY_S))
    assert first_s is not None
    assert auto.interval_s != first_s


def test_auto_never_asks_for_more_saves_than_can_end():
    auto = schedule("auto")
    auto.measured(stall_s=0.001, seconds=400.0)
    assert auto.interval_s == 400.0


def test_a_fixed_time_is_not_changed_by_what_saves_cost():
    fixed = schedule("10s")
    fixed.measured(stall_s=5.0, seconds=400.0)
    assert fixed.interval_s == 10.0


def test_small_costs_give_youngs_interval():
    assert optimal_interval_s(0.01, _DAY_S) == pytest.approx(math.sqrt(2 * 0.01 * _DAY_S), rel=0.01)


def test_a_save_that_takes_longer_than_the_job_lives_is_not_worth_repeating():
    assert optimal_interval_s(100.0, 10.0) == 10.0


@given(st.floats(0.001, 1e4), st.floats(1.0, 1e7))
def test_no_other_interval_wastes_less_time(cost_s, mtbf_s):
    """Against the model that the estimate approximates: exponential failures, no time to restart."""

    def wasted(interval_s):
        return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s

    if cost_s > 0.2 * mtbf_s:  # beyond that Daly's series is not meant
        return
    best = optimal_interval_s(cost_s, mtbf_s)
    assert wasted(best) <= 1.01 * min(wasted(best * factor) for factor in (0.3, 0.5, 0.8, 1.2, 2.0, 3.0))


def test_long_steps_are_asked_about_each_time():
    pace = Pace()
    for step in range(1, 5):
        assert pace.is_due(step)
        pace.asked(step, step_us=200_000, ask_us=300)


def test_short_steps_are_asked_about_so_rarely_that_it_costs_one_percent():
    pace = Pace()
    pace.asked(1, step_us=1_000, ask_us=200)
    assert next(step for step in range(2, 40) if pace.is_due(step)) == 21


def test_however_short_steps_are_somebody_asks():
    pace = Pace(100)
    pace.asked(101, step_us=0, ask_us=10_000)
    assert pace.is_due(101 + 64)
