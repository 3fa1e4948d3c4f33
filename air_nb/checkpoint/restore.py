"""Which checkpoint to go on with, and the way back in: every byte is checked and in memory before anything is touched.

On each rank: the manifest, the files of the ranks, the metadata and every shard that it needs are read and checked,
into memory of their own. Only when all ranks have done that, the loader is set, then model, optimizers, schedulers. A
checkpoint that is damaged on any rank is damaged on all, and the one before it is tried.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from air_nb.checkpoint import rng, tensors
from air_nb.checkpoint.catalog import CheckpointState, list_checkpoints
from air_nb.checkpoint.commit import read_manifest, step_of
from air_nb.checkpoint.events import CheckpointEvent, EventKind
from air_nb.checkpoint.group import Ranks
from air_nb.checkpoint.manifest import Manifest, record_of
from air_nb.checkpoint.saving import rank_file
from air_nb.checkpoint.state import Saved, TrainingState
from air_nb.checkpoint.storage import VolumeReader
from air_nb.checkpoint.store import Store, open_store
from air_nb.checkpoint.tensors import Target
from air_nb.checkpoint.values import decode, thaw
from air_nb.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointNotFoundError

__all__ = ["RESUME_VARIABLE", "Restored", "Resume", "RngState", "newest", "one"]

_log = logging.getLogger(__name__)

RESUME_VARIABLE = "AIR_NB_RESUME"
"""Set by ``--resume``; stronger than what the program says."""


class Resume(StrEnum):
    """What to go on with. AUTO: the newest checkpoint, if there is any. MUST: likewise, and there must be one.

    NEVER: nothing, start afresh.
    """

    AUTO = "auto"
    MUST = "must"
    NEVER = "never"

    @classmethod
    def chosen(cls, argument: str | os.PathLike[str]) -> Resume | str:
        """By the environment, else by the argument: one of these, or the path of a checkpoint."""
        text = os.environ.get(RESUME_VARIABLE) or os.fspath(argument)
        return cls(text) if text in tuple(cls) else text


@dataclass(frozen=True, slots=True)
class RngState:
    """Random number generators of one rank.

    Attributes:
        state: What ``rng.capture`` returned, on this rank or on rank 0.
        rank: Derive them for this rank, which was not there; None: they are its own.
    """

    state: Mapping[str, Any]
    rank: int | None

    def apply(self) -> None:
        """Set them."""
        if self.rank is None:
            rng.apply(self.state)
        else:
            rng.derive(self.state, self.rank)


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored.

    Attributes:
        step: Number of steps completed.
        path: Directory or URL of the checkpoint, as this rank sees it.
        rng: State of this rank's random number generators, which is to be set once the loader has begun.
        extra: What the manifest says besides.
        world_size: Number of ranks that saved it.
        left_out: What it has and this training has not.
    """

    step: int
    path: str
    rng: RngState
    extra: Mapping[str, Any]
    world_size: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A checkpoint in memory."""

    manifest: Manifest
    saved: Saved
    targets: Mapping[str, Target]
    rng: RngState


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A checkpoint that may be restored.

    Attributes:
        name: Name of its directory in the root, the same for all ranks.
        problem: Why it can't be, as far as sizes tell; empty if it can.
        is_complete: False: it was never committed.
    """

    name: str
    problem: str
    is_complete: bool


def newest(
    root: str, training: TrainingState, ranks: Ranks, *, tell: Callable[[CheckpointEvent], None]
) -> Restored | None:
    """Restore the newest checkpoint that is whole on all ranks. Collective: every rank calls.

    Args:
        root: Directory or URL of all checkpoints, as this rank sees it.
        training: What to restore into.
        ranks: All ranks.
        tell: Told of each one that is passed over.

    Returns:
        None: there is no checkpoint. What was never committed is none.

    Raises:
        CheckpointDamagedError: There are some, and all are damaged.
        CheckpointMismatchError: As ``one``; so the other errors.
    """
    rejected: list[str] = []
    unfinished: list[str] = []
    for candidate in ranks.broadcast(f"list {root}", lambda: _candidates(root)):
        path = open_store(root).child(candidate.name).url
        if not candidate.is_complete:
            unfinished.append(path)
            message = f"{path} was never committed: trying the one before it"
            tell(CheckpointEvent(EventKind.REJECTED, step_of(candidate.name), path, message))
            continue
        try:
            return one(path, training, ranks, problem=candidate.problem)
        except (CheckpointDamagedError, CheckpointNotFoundError) as error:
            rejected.append(f"{candidate.name}: {error}")
            message = f"{path} is damaged ({error}): trying the one before it"
            _log.warning("%s", message)
            tell(CheckpointEvent(EventKind.REJECTED, step_of(candidate.name), path, message))
    if rejected:
        msg = f"all {len(rejected)} checkpoints in {root} are damaged; resume='never' starts afresh:\n  " + "\n  ".join(
            rejected
        )
        raise CheckpointDamagedError(msg)
    if unfinished:
        _log.warning("starting afresh: %s was never committed, and there is no other", ", ".join(unfinished))
    return None


def _candidates(root: str) -> list[_Candidate]:
    """What there is to go on with, in the order in which it is tried."""
    return [
        _Candidate(
            name=info.path.rstrip("/").rpartition("/")[2],
            problem=info.reason if info.state is CheckpointState.DAMAGED else "",
            is_complete=info.state is not CheckpointState.INCOMPLETE,
        )
        for info in list_checkpoints(root)
    ]


def one(path: str, training: TrainingState, ranks: Ranks, *, problem: str = "") -> Restored:
    """Restore one checkpoint. Collective: every rank calls.

    Args:
        path: Its own directory or URL, as this rank sees it.
        training: What to restore into: untouched if this raises one of the first three.
        ranks: All ranks.
        problem: What is known to be wrong with it; empty if nothing is.

    Raises:
        CheckpointDamagedError: It is damaged, or can't be read, for some rank.
        CheckpointMismatchError: It is of another training, or of a newer air_nb.
        DataError: The data set is another one, or has changed; the loader's own.
        CheckpointError: It could not be put into the objects; they are in no defined state.
    """
    loaded: _Loaded | None = None

    def load() -> None:
        nonlocal loaded
        loaded = _load(path, training, ranks, problem)

    ranks.agree(f"read {path}", load)
    assert loaded is not None
    saved, targets = loaded.saved, loaded.targets
    ranks.agree(f"go to the position in the data of {path}", lambda: training.apply_position(saved))
    ranks.agree(
        f"put {path} in place (model and optimizer may now be partly restored: start again)",
        lambda: training.apply(saved, targets),
    )
    return Restored(
        step=loaded.manifest.step or 0,
        path=path,
        rng=loaded.rng,
        extra=loaded.manifest.extra,
        world_size=loaded.manifest.world_size,
        left_out=tuple(training.left_out(saved)),
    )


def _load(path: str, training: TrainingState, ranks: Ranks, problem: str) -> _Loaded:
    """Read and check everything that this rank needs, touching nothing."""
    try:
        store = open_store(path)
        manifest = read_manifest(store)
        if manifest is None:
            msg = f"{path} is no committed checkpoint"
            raise CheckpointNotFoundError(msg)
        if problem:
            raise CheckpointDamagedError(problem)
        if rank_file(0) not in manifest.files:
            msg = (
                f"{path} was not saved by a CheckpointManager: load it with dcp.load and VolumeReader, or give the "
                "manager a root of its own"
            )
            raise CheckpointMismatchError(msg)
        first = decode(_checked(store, rank_file(0), manifest))
        was_there = ranks.rank < manifest.world_size
        mine = decode(_checked(store, rank_file(ranks.rank), manifest)) if was_there and ranks.rank else first
        reader = VolumeReader(path)
        is_same_grid = manifest.world_size == ranks.world_size
        saved = Saved(
            metadata=reader.read_metadata(),
            shared=first["shared"],
            own=(mine if is_same_grid else first)["own"],
            alike=frozenset(manifest.extra.get("alike", ())),
            data=manifest.data,
            world_size=manifest.world_size,
            is_same_grid=is_same_grid,
        )
        targets = training.targets(saved)
        tensors.read(reader, saved.metadata, targets)
        if is_same_grid:
            for name, own in mine.get("tensors", {}).items():
                if name in targets:
                    targets[name].part.copy_(own)
    except OSError as error:
        msg = f"{path} can't be read: {type(error).__name__}: {error}"
        raise CheckpointDamagedError(msg) from error
    return _Loaded(manifest, saved, targets, RngState(thaw(mine["rng"]), None if was_there else ranks.rank))


def _checked(store: Store, name: str, manifest: Manifest) -> bytes:
    """Content of a file that is what was committed."""
    content = store.read(name)
    expected = manifest.files[name]
    if record_of(content, expected.algorithm) != expected:
        msg = f"{store}: {name} ({len(content)} bytes) is not what was committed ({expected.size_bytes} bytes)"
        raise CheckpointDamagedError(msg)
    return content
