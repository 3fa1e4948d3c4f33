"""What air_nb itself measures of a run, as MLflow's metrics. Pure.

MLflow groups charts by what is before the last slash of a key: a group for each figure, with a chart for each rank.
"""

from __future__ import annotations

from air_nb.runs.checkpoints import CommittedCheckpoint
from air_nb.runs.loading import LoadingFigures

__all__ = ["checkpoint_metrics", "loading_metrics"]


def loading_metrics(rank: int, figures: LoadingFigures) -> list[tuple[str, float, int, int]]:
    """(key, value, timestamp in ms, step); the step is the number of batches so far.

    Args:
        rank: Whose they are.
        figures: One line of them.
    """
    values = {
        "data_wait_percent": figures.wait_percent,
        "data_longest_wait_seconds": figures.longest_wait_s,
        "data_examples_per_second": figures.examples_per_s,
    }
    if figures.hit_percent is not None:
        values |= {"cache_hit_percent": figures.hit_percent, "cache_fetched_bytes": float(figures.fetched_bytes)}
    at_ms = int(figures.at * 1000)
    return [(f"air_nb/{name}/rank_{rank}", value, at_ms, figures.batches) for name, value in values.items()]


def checkpoint_metrics(committed: CommittedCheckpoint) -> list[tuple[str, float, int, int]]:
    """(key, value, timestamp in ms, step) of what is known; the step is that of the checkpoint."""
    values = {
        "checkpoint_stall_seconds": committed.stall_s,
        "checkpoint_save_seconds": committed.seconds,
        "checkpoint_bytes": committed.size_bytes,
    }
    at_ms = int(committed.at * 1000)
    return [
        (f"air_nb/{name}", float(value), at_ms, committed.step) for name, value in values.items() if value is not None
    ]
