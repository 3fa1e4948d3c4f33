"""From the ranks' spools to the store, in batches: nothing is lost, and one bad value holds up no other.

So is what the ranks measure of their data loaders, and each checkpoint that they commit: a tag, and what it cost.

Offsets move when a part has been sent, so after a crash some of it is sent twice. Tags and parameters don't mind, and
databases keep one of equal metrics (same key, step, time and value).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from air_nb.protocol.tracking import spool_name
from air_nb.runs.checkpoints import committed_checkpoints
from air_nb.runs.directory import locate
from air_nb.runs.loading import loading_file, read_loading
from air_nb.tracking import spool
from air_nb.tracking.artifacts import Artifacts
from air_nb.tracking.causes import one_line
from air_nb.tracking.figures import checkpoint_metrics, loading_metrics
from air_nb.tracking.mlflow_run import MlflowRun
from air_nb.tracking.spool import SpoolEntry
from air_nb.tracking.store import StoreError
from air_nb.tracking.tracked_file import TrackedFile

__all__ = ["Batch", "Forwarder", "batches", "send"]

_PART_BYTES = 1 << 20  # of each spool at a time
_MAX_ENTITIES = 1000  # of one log_batch call, all kinds together; MLflow's limits
_MAX_PARAMS_OR_TAGS = 100

_RUN_NAME_TAG = "mlflow.runName"


@dataclass(slots=True)
class Batch:
    """What one call of ``log_batch`` can take."""

    metrics: list[tuple[str, float, int, int]] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.metrics) + len(self.params) + len(self.tags)

    def parts(self) -> list[Batch]:
        """Smaller ones that hold the same: one for each kind, else halves."""
        kinds = [Batch(metrics=self.metrics), Batch(params=self.params), Batch(tags=self.tags)]
        kinds = [part for part in kinds if part]
        if len(kinds) > 1:
            return kinds
        middle = len(self) // 2
        params, tags = list(self.params.items()), list(self.tags.items())
        return [
            Batch(self.metrics[:middle], dict(params[:middle]), dict(tags[:middle])),
            Batch(self.metrics[middle:], dict(params[middle:]), dict(tags[middle:])),
        ]

    def describe(self) -> str:
        """Its first value, for a message."""
        if self.params:
            return "Parameter {}={!r:.80}".format(*next(iter(self.params.items())))
        if self.tags:
            return "Tag {}={!r:.80}".format(*next(iter(self.tags.items())))
        key, value, _, step = self.metrics[0]
        return f"Metric {key}={value!r} of step {step}"


def batches(entries: Iterable[SpoolEntry]) -> Iterator[Batch]:
    """Batches within MLflow's limits. A parameter that changes begins a new one: only the change is to be refused."""
    batch = Batch()
    for entry in entries:
        for metric in entry.metrics:
            if len(batch) == _MAX_ENTITIES:
                yield batch
                batch = Batch()
            batch.metrics.append(metric)
        for key, value in entry.params:
            if _is_full(batch, batch.params) or batch.params.get(key, value) != value:
                yield batch
                batch = Batch()
            batch.params[key] = value
        for key, value in _tags(entry):
            if _is_full(batch, batch.tags):
                yield batch
                batch = Batch()
            batch.tags[key] = value
    if batch:
        yield batch


def _is_full(batch: Batch, kind: dict[str, str]) -> bool:
    return len(batch) == _MAX_ENTITIES or len(kind) == _MAX_PARAMS_OR_TAGS


def _tags(entry: SpoolEntry) -> Iterator[tuple[str, str]]:
    yield from entry.tags
    if entry.run_name is not None:
        yield _RUN_NAME_TAG, entry.run_name


def send(run: MlflowRun, batch: Batch, refuse: Callable[[str], None]) -> None:
    """Send all that the store takes; the rest is refused, value by value.

    A store that stumbles over a batch and still takes a tag has something against the batch, whatever it calls it.

    Raises:
        StoreError: The store is not there; all of the batch is to be sent again.
    """
    try:
        run.log_batch(batch.metrics, batch.params, batch.tags)
    except StoreError as error:
        if error.passing:
            raise
        run.prove_usable()
        if len(batch) == 1:
            refuse(one_line(f"{batch.describe()}: {error.why}") + ".")
            return
        for part in batch.parts():
            send(run, part, refuse)


class Forwarder:
    """Forwards the spools of one run; used by one thread.

    Args:
        path: Run directory.
        nproc: Number of ranks.
        tracked: Has the offsets, and where it is noted what the store does not take.
    """

    def __init__(self, path: Path, nproc: int, tracked: TrackedFile) -> None:
        self._path = path
        self._nproc = nproc
        self._tracked = tracked

    def forward(self, run: MlflowRun, artifacts: Artifacts) -> bool:
        """Send the next part of every spool.

        Returns:
            Whether there was anything.

        Raises:
            StoreError: The store is not there.
        """
        offsets = self._padded(self._tracked.now.sent)
        loading_offsets = self._padded(self._tracked.now.sent_loading)
        checkpoints_sent = self._tracked.now.sent_checkpoints
        parts = self._read(offsets)
        loading, loading_moved = self._read_loading(loading_offsets)
        checkpoints = self._read_checkpoints(checkpoints_sent)
        entries = [entry for part in parts for entry in part.entries]
        for batch in batches([*entries, *loading, *checkpoints]):
            send(run, batch, self._refuse)
        for entry in entries:
            if entry.artifact is not None:
                artifacts.send_spooled(*entry.artifact)
        moved = [part.offset for part in parts]
        self._tracked.update(
            sent=moved,
            sent_loading=loading_moved,
            sent_checkpoints=checkpoints_sent + len(checkpoints),
            problem=None,
        )
        return bool(checkpoints) or (moved, loading_moved) != (offsets, loading_offsets)

    def _padded(self, sent: list[int]) -> list[int]:
        return [*sent, *[0] * (self._nproc - len(sent))]

    def _read(self, offsets: list[int]) -> list[spool.SpoolPart]:
        folder = locate(self._path).path
        parts = []
        for rank, offset in enumerate(offsets):
            part = spool.read(folder / spool_name(rank), offset, _PART_BYTES)
            if part.skipped:
                self._refuse(f"Rank {rank} left {part.skipped} entries that can't be read: was its disk full?")
            parts.append(part)
        return parts

    def _read_loading(self, offsets: list[int]) -> tuple[list[SpoolEntry], list[int]]:
        folder = locate(self._path).path
        entries, moved = [], []
        for rank, offset in enumerate(offsets):
            figures, following = read_loading(folder / loading_file(rank), offset, _PART_BYTES)
            entries += [SpoolEntry(metrics=loading_metrics(rank, one)) for one in figures]
            moved.append(following)
        return entries, moved

    def _read_checkpoints(self, sent: int) -> list[SpoolEntry]:
        new = committed_checkpoints(locate(self._path).path)[sent:]
        return [
            SpoolEntry(metrics=checkpoint_metrics(one), tags=[(f"air_nb.checkpoint.{one.step}", one.path)])
            for one in new
        ]

    def _refuse(self, sentence: str) -> None:
        sys.stderr.write(f"air_nb: run {self._path.name}: {sentence}\n")
        self._tracked.refuse(sentence)
