from __future__ import annotations

import pytest

from air_nb.runs.checkpoints import CommittedCheckpoint
from air_nb.runs.loading import LoadingFigures
from air_nb.session.run_figures import figures_line


def _loading(wait_s: float, **changes: int) -> LoadingFigures:
    return LoadingFigures(1.0, 10.0, 5, 6200, wait_s, wait_s, **changes)


def _committed(stall_s: float) -> CommittedCheckpoint:
    return CommittedCheckpoint("/data/step_1.aa", 1, 1.0, stall_s, 3.0, 100)


@pytest.mark.parametrize(
    "loading, committed, says",
    [
        ({}, None, ""),
        ({0: _loading(1.2)}, None, "data wait 12 % · 620 examples/s"),
        (
            {0: _loading(1.2, hits=99), 3: _loading(5, hits=1, misses=100, fetched_bytes=1_234_567_890)},
            None,
            "data wait 50 % (rank 3) · 1,240 examples/s · 50 % from the cache · 1.15 GiB downloaded",
        ),
        ({}, CommittedCheckpoint("/data/step_1.aa", 1, 1.0), ""),
        ({}, _committed(0.0372), "last save held up training for 37 ms"),
        ({0: _loading(0)}, _committed(2), "data wait 0 % · 620 examples/s · last save held up training for 2.0 s"),
    ],
)
def test_it_is_one_line_about_the_rank_that_waits_most(loading, committed, says):
    assert figures_line(loading, committed) == says
