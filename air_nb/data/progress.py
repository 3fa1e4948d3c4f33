"""One line on stderr, now and then, while the files of a dataset are downloaded for the first time."""

from __future__ import annotations

import os
import sys
import time

from air_nb.data.cache import CacheMetrics
from air_nb.data.listing import rank_and_world_size

__all__ = ["FetchProgress"]

_INTERVAL_S = 5.0


class FetchProgress:
    """Says how far the downloads are, on rank 0, at most every 5 s and only after a download.

    Args:
        root: What is downloaded.
        n_files: Number of its files.
    """

    def __init__(self, root: str, n_files: int) -> None:
        self._root = root
        self._n_files = n_files
        self._started_at = self._told_at = time.monotonic()
        self._told_misses = 0

    def show(self, metrics: CacheMetrics) -> None:
        """Say it, if it is time.

        Args:
            metrics: What was done so far, by this rank with all its loader workers.
        """
        now = time.monotonic()
        if metrics.misses == self._told_misses or now - self._told_at < _INTERVAL_S or _rank() != 0:
            return
        self._told_at, self._told_misses = now, metrics.misses
        rate_mb_s = metrics.fetched_bytes / 1e6 / (now - self._started_at)
        sys.stderr.write(
            f"air_nb: {self._root}: {metrics.misses:,} of {self._n_files:,} files downloaded by rank 0, "
            f"{metrics.fetched_bytes / 2**30:,.2f} GiB, {rate_mb_s:,.0f} MB/s\n"
        )
        sys.stderr.flush()


def _rank() -> int:
    rank, world_size = rank_and_world_size()
    return rank if world_size > 1 else int(os.environ.get("RANK", "0"))
