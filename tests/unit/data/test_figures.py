"""What the loaders of a rank tell of themselves, and when."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from air_nb.data import DataLoader, figures
from air_nb.data.cache import CacheMetrics
from air_nb.data.figures import Figures, figures_of_this_process
from air_nb.runs.checkpoints import RUN_DIR_VARIABLE
from air_nb.runs.loading import LoadingFigures, loading_file, read_loading

Told = Callable[[], list[LoadingFigures]]


@pytest.fixture
def told(tmp_path, monkeypatch) -> Told:
    """What was told up to now."""
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    path = Path(tmp_path, loading_file(0))
    return lambda: read_loading(path, 0, 1 << 20)[0]


def test_a_line_is_told_when_it_is_time_and_covers_what_was_since_the_one_before(told):
    adding = Figures(every_s=10)
    adding.add(100.0, 103.0, 4, CacheMetrics(hits=3, misses=1, waited=1, fetched_bytes=50))
    adding.add(105.0, 105.5, 4, None)
    assert told() == []
    adding.add(111.0, 112.0, 2, CacheMetrics(hits=1, fetched_bytes=5))
    adding.add(115.0, 122.0, 1, None)
    first, second = told()
    assert (first.seconds, first.batches, first.examples) == (12, 3, 10)
    assert (first.wait_s, first.longest_wait_s) == (4.5, 3)
    assert (first.hits, first.misses, first.fetched_bytes) == (4, 2, 55)
    assert (second.seconds, second.batches, second.examples, second.wait_s) == (10, 4, 1, 7)
    assert (second.hits, second.misses, second.fetched_bytes) == (0, 0, 55)


def test_the_end_of_a_pass_tells_the_rest_unless_it_is_short(told):
    adding = Figures(shortest_s=0.5)
    now_s = time.perf_counter()
    adding.add(now_s - 0.2, now_s, 4, None)
    adding.end_pass()
    assert told() == []
    adding.add(now_s, now_s + 0.1, 4, None)
    time.sleep(0.6)
    adding.end_pass()
    adding.end_pass()
    [line] = told()
    assert (line.batches, line.examples) == (2, 8)
    assert line.seconds >= 0.8
    adding.add(now_s + 100, now_s + 105, 4, None)  # what was between the passes is left out
    adding.add(now_s + 105, now_s + 111, 4, None)
    assert told()[1].seconds == pytest.approx(11)


def test_all_loaders_of_a_process_are_counted_together_and_a_child_for_itself(told, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "_EVERY_S", 0.0)
    figures_of_this_process.cache_clear()
    monkeypatch.setattr(figures, "Figures", lambda: Figures(every_s=0.0))
    for _ in range(2):
        list(DataLoader([1, 2, 3], 2, num_workers=0))
    assert [line.batches for line in told()] == [1, 2, 3, 4]
    assert [line.examples for line in told()] == [2, 1, 2, 1]
    child = os.fork()
    if child == 0:
        list(DataLoader([1, 2, 3], 2, num_workers=0))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [line.batches for line in told()[4:]] == [1, 2]
    figures_of_this_process.cache_clear()


def test_a_pass_that_is_left_early_is_told(told, monkeypatch):
    figures_of_this_process.cache_clear()
    monkeypatch.setattr(figures, "Figures", lambda: Figures(shortest_s=0.0))
    for _batch in DataLoader([1, 2, 3], 1, num_workers=0):
        break
    assert [line.examples for line in told()] == [1]
    figures_of_this_process.cache_clear()


def test_an_iterator_that_is_collected_while_a_batch_is_counted_is_no_error_and_tells_nothing_twice(told):
    adding = Figures(every_s=10.0, shortest_s=0.0)

    class Collecting:
        hits = misses = waited = 0

        @property
        def fetched_bytes(self) -> int:
            adding.end_pass()
            return 7

    collecting: Any = Collecting()
    now_s = time.perf_counter()
    adding.add(now_s - 20, now_s - 18, 3, None)
    adding.add(now_s - 17, now_s - 16, 4, collecting)
    assert told() == []
    adding.end_pass()
    [line] = told()
    assert (line.batches, line.examples, line.wait_s, line.fetched_bytes) == (2, 7, pytest.approx(3), 7)


def test_outside_a_run_nothing_is_counted(monkeypatch):
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    figures_of_this_process.cache_clear()
    assert figures_of_this_process() is None
    figures_of_this_process.cache_clear()


def test_a_child_is_not_stopped_by_a_thread_of_its_parent_that_is_counting(told):
    adding = Figures(every_s=0.0)
    os.register_at_fork(after_in_child=adding._begin_anew)
    inside, leave = threading.Event(), threading.Event()

    class Slow:
        hits = misses = waited = 0

        @property
        def fetched_bytes(self) -> int:
            inside.set()
            leave.wait(10)
            return 0

    slow: Any = Slow()
    thread = threading.Thread(target=lambda: adding.add(0.0, 1.0, 1, slow), name="counter")
    thread.start()
    assert inside.wait(10)
    child = os.fork()
    if child == 0:
        adding.add(0.0, 1.0, 1, None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    leave.set()
    thread.join(10)
    assert [line.batches for line in told()] == [1, 1]
