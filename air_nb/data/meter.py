"""What a loader has done on its rank: counted as batches are given to the loop."""

from __future__ import annotations

import time
from dataclasses import dataclass

from air_nb.data.cache import CacheMetrics
from air_nb.data.figures import figures_of_this_process
from air_nb.data.items import Notes

__all__ = ["LoaderMetrics", "Meter"]


@dataclass(frozen=True, slots=True)
class LoaderMetrics:
    """What a loader has done on this rank since it was made.

    Attributes:
        batches: Batches delivered.
        examples: Examples in them that count.
        wait_s: Time for which the loop waited for batches.
        elapsed_s: Time from asking for the first batch to being given the last one.
        examples_per_s: Examples by that time; None before the first batch.
        skipped: Items that could not be read and were left out, as far as this rank knows.
        cache: What the cache has done for this rank and its loader workers; None without one.
    """

    batches: int
    examples: int
    wait_s: float
    elapsed_s: float
    examples_per_s: float | None
    skipped: int
    cache: CacheMetrics | None


class Meter:
    """Adds up what goes into ``LoaderMetrics``."""

    def __init__(self) -> None:
        self.cache: CacheMetrics | None = None
        self._batches = self._examples = 0
        self._wait_s = 0.0
        self._first_at = self._last_at = 0.0

    def add(self, notes: Notes, asked_at: float) -> None:
        """Count a batch that is given to the loop now.

        Args:
            notes: What came with it.
            asked_at: When it was asked for, by ``time.perf_counter``.
        """
        self._last_at = time.perf_counter()
        self._first_at = self._first_at or asked_at
        self._wait_s += self._last_at - asked_at
        self._batches += 1
        examples = notes.valid.count(True)
        self._examples += examples
        if notes.cache is not None:
            self.cache = notes.cache if self.cache is None else self.cache + notes.cache
        if (figures := figures_of_this_process()) is not None:  # not kept: a loader may be pickled into a rank
            figures.add(asked_at, self._last_at, examples, notes.cache)

    def end_pass(self) -> None:
        """The pass is over, or was left."""
        if (figures := figures_of_this_process()) is not None:
            figures.end_pass()

    def metrics(self, skipped: int) -> LoaderMetrics:
        """The sums so far.

        Args:
            skipped: Items that were left out.
        """
        elapsed_s = self._last_at - self._first_at
        return LoaderMetrics(
            batches=self._batches,
            examples=self._examples,
            wait_s=self._wait_s,
            elapsed_s=elapsed_s,
            examples_per_s=self._examples / elapsed_s if elapsed_s > 0 else None,
            skipped=skipped,
            cache=self.cache,
        )
