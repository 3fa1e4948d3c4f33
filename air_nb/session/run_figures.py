"""What a run's loaders and checkpoints have cost, in one line of the panel (pure, but for reading it)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from air_nb.runs.checkpoints import CommittedCheckpoint, newest_checkpoint
from air_nb.runs.loading import LoadingFigures, newest_loading

if TYPE_CHECKING:
    from air_nb.runs.directory import RunDirectory

__all__ = ["figures_line", "run_figures"]

_SEPARATOR = " · "
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def run_figures(directory: RunDirectory, nproc: int) -> str:
    """The newest figures of a run; empty if it has none."""
    return figures_line(newest_loading(directory.path, nproc), newest_checkpoint(directory.path))


def figures_line(loading: Mapping[int, LoadingFigures], committed: CommittedCheckpoint | None) -> str:
    """Say it.

    Args:
        loading: The newest figures by rank.
        committed: The newest checkpoint.
    """
    parts = list(_of_loaders(loading)) if loading else []
    if committed is not None and committed.stall_s is not None:
        parts.append(f"last save held up training for {_seconds(committed.stall_s)}")
    return _SEPARATOR.join(parts)


def _of_loaders(loading: Mapping[int, LoadingFigures]) -> Iterator[str]:
    figures = loading.values()
    slowest = max(loading, key=lambda rank: loading[rank].wait_percent)
    which = f" (rank {slowest})" if len(loading) > 1 else ""
    yield f"data wait {loading[slowest].wait_percent:.0f} %{which}"
    yield f"{sum(one.examples_per_s for one in figures):,.0f} examples/s"
    hits, misses = sum(one.hits for one in figures), sum(one.misses for one in figures)
    if hits or misses:
        yield f"{100 * hits / (hits + misses):.0f} % from the cache"
    if fetched_bytes := sum(one.fetched_bytes for one in figures):
        yield f"{_size(fetched_bytes)} downloaded"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _size(n_bytes: float) -> str:
    for unit in _BYTES[:-1]:
        if n_bytes < 1000:  # noqa: PLR2004 - three digits
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.3g} {_BYTES[-1]}"
