"""Which of several failed ranks is the cause, and which failures are only its consequences."""

from __future__ import annotations

from typing import Any

import pytest

from air_nb.launch.failures import describe_exit, find_failures, has_failed
from air_nb.protocol.start import RankReport


class _Rank:
    """What of a ``RankProcess`` is looked at."""

    pid = 1234

    def __init__(
        self, rank: int, *, exit_code: int | None = None, ended_at: float = 0.0, report: RankReport | None = None
    ) -> None:
        self.rank = rank
        self.ended_at = ended_at
        self.report = report
        self._exit_code = exit_code

    def poll(self) -> int | None:
        return self._exit_code


def _raised(rank: int, at: float, **fields: Any) -> _Rank:
    return _Rank(rank, report=RankReport(ok=False, at=at, type_name="ValueError", message="no", **fields))


def _order(*ranks: _Rank) -> list[int]:
    return [failure.rank for failure in find_failures(ranks, attempt=0)]  # type: ignore[arg-type]


def test_the_earliest_report_is_the_cause_whatever_its_rank():
    assert _order(_raised(0, 12.0), _raised(1, 11.0), _raised(2, 13.0)) == [1, 0, 2]


def test_a_death_is_the_cause_of_reports_that_came_before_it_was_noticed():
    assert _order(_raised(0, 11.0), _Rank(1, exit_code=-9, ended_at=12.0)) == [1, 0]
    assert _order(_raised(0, 11.0), _Rank(1, exit_code=0, ended_at=12.0)) == [1, 0]


def test_a_signal_comes_before_an_exit_code():
    assert _order(_Rank(0, exit_code=1, ended_at=11.0), _Rank(1, exit_code=-11, ended_at=12.0)) == [1, 0]


def test_broken_collectives_of_the_others_are_no_failures_of_their_own():
    dead = _Rank(1, exit_code=-9, ended_at=12.0)
    assert _order(_raised(0, 11.0, in_collective=True), dead, _raised(2, 11.0)) == [1, 2]
    assert _order(_raised(0, 11.0), _raised(1, 12.0, in_collective=True)) == [0]


def test_a_collective_that_fails_first_is_the_cause():
    assert _order(_raised(0, 11.0, in_collective=True), _raised(1, 12.0, in_collective=True)) == [0, 1]


def test_a_rank_that_dies_after_its_good_report_has_failed():
    rank = _Rank(0, exit_code=-11, ended_at=3.0, report=RankReport(ok=True, at=1.0))
    assert has_failed(rank)  # type: ignore[arg-type]
    (failure,) = find_failures([rank], attempt=2)  # type: ignore[list-item]
    assert (failure.signal, failure.exit_code, failure.at, failure.attempt) == ("SIGSEGV", None, 3.0, 2)


@pytest.mark.parametrize("rank", [_Rank(0), _Rank(0, exit_code=0, report=RankReport(ok=True, at=1.0))])
def test_a_rank_that_runs_or_has_ended_well_has_not_failed(rank: _Rank):
    assert not has_failed(rank)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "exit_code,text",
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_exit_reads_as_what_it_was(exit_code: int, text: str):
    assert describe_exit(exit_code) == text
