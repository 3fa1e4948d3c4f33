"""What the loaders of this process do, told to its run now and then: see ``air_nb.runs.loading``.

All loaders of a rank together: a training waits for the one of its validation, too. There is no thread and no timer: a
batch that is delivered looks whether it is time.
"""

from __future__ import annotations

import functools
import os
import threading
import time

from air_nb.data.cache import CacheMetrics
from air_nb.runs.checkpoints import RUN_DIR_VARIABLE
from air_nb.runs.loading import LoadingFigures, record_loading

__all__ = ["Figures", "figures_of_this_process"]

_EVERY_S = 10.0
_SHORTEST_S = 1.0


class Figures:
    """Adds up what goes into the next line. Thread-safe; a forked child begins anew.

    Args:
        every_s: Time between two lines, in a pass.
        shortest_s: Of a line at the end of a pass; what is shorter becomes a part of the next one.
    """

    def __init__(self, every_s: float = _EVERY_S, shortest_s: float = _SHORTEST_S) -> None:
        self._every_s = every_s
        self._shortest_s = shortest_s
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._lock = threading.RLock()  # an iterator that is collected while a batch is counted ends its pass
        self._is_counting = False
        self._batches = self._fetched_bytes = 0
        self._clear(None)

    def _clear(self, since_s: float | None) -> None:
        self._since_s = since_s
        self._examples = self._hits = self._misses = 0
        self._wait_s = self._longest_wait_s = 0.0

    def add(self, asked_at_s: float, given_at_s: float, examples: int, cache: CacheMetrics | None) -> None:
        """Count a batch.

        Args:
            asked_at_s: When it was asked for, by ``time.perf_counter``.
            given_at_s: When it was there.
            examples: Examples in it that count.
            cache: What the cache did for it.
        """
        with self._lock:
            self._is_counting = True
            if self._since_s is None:
                self._since_s = asked_at_s
            wait_s = given_at_s - asked_at_s
            self._batches += 1
            self._examples += examples
            self._wait_s += wait_s
            self._longest_wait_s = max(self._longest_wait_s, wait_s)
            if cache is not None:
                self._hits += cache.hits
                self._misses += cache.misses + cache.waited
                self._fetched_bytes += cache.fetched_bytes
            if given_at_s - self._since_s >= self._every_s:
                self._tell(given_at_s)
                self._clear(given_at_s)
            self._is_counting = False

    def end_pass(self) -> None:
        """A pass is over, or was left: tell what was not told yet. What comes before the next one is no loading.

        In the middle of ``add`` of the same thread, where an iterator may be collected, that is left to the next line.
        """
        now_s = time.perf_counter()
        with self._lock:
            if self._is_counting or self._since_s is None:
                return
            if now_s - self._since_s >= self._shortest_s:
                self._tell(now_s)
                self._clear(None)

    def _tell(self, now_s: float) -> None:
        assert self._since_s is not None
        record_loading(
            LoadingFigures(
                at=time.time(),
                seconds=now_s - self._since_s,
                batches=self._batches,
                examples=self._examples,
                wait_s=self._wait_s,
                longest_wait_s=self._longest_wait_s,
                hits=self._hits,
                misses=self._misses,
                fetched_bytes=self._fetched_bytes,
            )
        )


@functools.cache
def figures_of_this_process() -> Figures | None:
    """Those that go to the run that this process is a rank of; None outside one."""
    if RUN_DIR_VARIABLE not in os.environ:
        return None
    figures = Figures()
    os.register_at_fork(after_in_child=figures._begin_anew)  # noqa: SLF001 - its own
    return figures
