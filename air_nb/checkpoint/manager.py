"""``CheckpointManager``: a training loop that goes on where it was, whatever ended it.

It runs on every rank, on the thread that trains; what it does itself is little: it knows when to save and what to
restore, and leaves the doing to ``saving.py`` and ``restore.py``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from air_nb.checkpoint import restore, rng
from air_nb.checkpoint.boundary import Boundary
from air_nb.checkpoint.catalog import CheckpointInfo, find_latest_valid
from air_nb.checkpoint.events import CheckpointEvent, EventKind, say
from air_nb.checkpoint.group import Ranks
from air_nb.checkpoint.restore import Restored, Resume
from air_nb.checkpoint.saving import Saver, SaveReport
from air_nb.checkpoint.schedule import Every, Schedule
from air_nb.checkpoint.signals import StopReason, StopRequest, listening, marked_as_saving, stop_grace_s
from air_nb.checkpoint.state import Snapshot, TrainingState
from air_nb.checkpoint.store import open_store
from air_nb.errors import CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["CheckpointManager"]

_log = logging.getLogger(__name__)

_MTBF_S = 24 * 3600.0
_TIMEOUT_S = 1800.0


class CheckpointManager:
    """Saves a training, and goes on from the newest checkpoint that is whole.

    ::

        ckpt = CheckpointManager(root, model=model, optimizer=opt, scheduler=sched, data=loader, every="10min")
        for step, batch in ckpt.steps(loader, epochs=3):
            train_step(batch)

    Every rank makes one and calls the same methods in the same order. It works with any backend of torch.distributed
    (it makes gloo groups of its own) and in a single process. A checkpoint that is listed as valid restores bit for
    bit: model, optimizers, schedulers, the position in the data, and the random number generators of each rank.

    Restored on another number of ranks, models and optimizers are resharded and a ``data.DataLoader`` goes on at the
    same sample; ranks that were not there derive their random numbers, and other loaders refuse.

    Args:
        root: Directory or URL of this training's checkpoints, seen by all ranks; None: AIR_NB_CHECKPOINT_ROOT, else
            ``checkpoints/<run name>`` in the current directory.
        model: As it is trained: plain, DistributedDataParallel, ``fully_shard``, compiled.
        optimizer: One, or several in a list or dictionary.
        scheduler: Likewise.
        data: The loader; any that has ``state_dict`` and ``load_state_dict``.
        state: More to save, by name: objects with these two methods; modules (an average of weights) are saved as the
            model is, anything else by each rank for itself.
        every: When ``steps`` saves: 500 (steps), ``"10min"``, ``"auto"`` (as often as ``mtbf_s`` makes it worth what
            saving costs), or None: only at the end and when stopped.
        mtbf_s: Mean time between failures of the whole job, for ``"auto"``.
        keep: How many checkpoints stay; never fewer than 2.
        asynchronous: Save in a thread, from a copy in host memory (as large as model and optimizer on this rank; if
            ``steps`` saves, it is taken after the first step).
        resume: What ``steps`` and ``restore`` go on with: ``"auto"``, ``"must"`` (an error if there is none),
            ``"never"``, or the path of one checkpoint. AIR_NB_RESUME, which ``--resume`` sets, is stronger.
        on_event: Called on rank 0 with each ``CheckpointEvent``, in the thread where it happens.
        timeout_s: How long ranks wait for each other.

    Raises:
        TypeError: Something that was given can't be saved.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None = None,
        scheduler: Any = None,
        data: Any = None,
        state: Mapping[str, Any] | None = None,
        every: int | str | None = None,
        mtbf_s: float = _MTBF_S,
        keep: int = 3,
        asynchronous: bool = True,
        resume: str | os.PathLike[str] = "auto",
        on_event: Callable[[CheckpointEvent], None] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        if keep < 1:
            msg = f"keep={keep}: how many checkpoints stay, at least 1 (2 always do)"
            raise ValueError(msg)
        if not timeout_s > 0:
            msg = f"timeout_s={timeout_s}: seconds that ranks wait for each other"
            raise ValueError(msg)
        self._root = os.fspath(root) if root is not None else _default_root()
        self._training = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, data=data, state=state)
        self._schedule = Schedule(Every.parse(every), mtbf_s=mtbf_s, now_s=time.monotonic())
        self._keep = keep
        self._asynchronous = asynchronous
        self._resume = resume
        self._on_event = on_event
        self._timeout_s = timeout_s
        self._connection: tuple[Ranks, Saver] | None = None
        self._has_restored = False
        self._is_prepared = False
        self._rng: restore.RngState | None = None  # to be set again once the loader has begun
        self._step = 0
        self._epochs_done = 0
        self._saved_step: int | None = None
        self._saved_epochs = 0

    # --------------------------------------------------------------------------------------------------- the loop

    def steps(self, loader: Iterable[Any] | None = None, epochs: int = 1) -> Iterator[tuple[int, Any]]:
        """Restore, then go through the data, saving on the way. Collective: every rank goes through it.

        Yields the number of steps completed before a batch, and the batch. A batch counts once the loop asks for the
        next one: what is saved is always the state between two steps. The last checkpoint is that of the end; the first
        SIGTERM or interrupt lets the step end, saves, and then ends the loop as it would have done.

        Args:
            loader: The loader that is saved as ``data``; it need not be given twice.
            epochs: How many in all, counted from the start of the training.

        Raises:
            ValueError: There is no loader, or another one than ``data``, or no epoch.
            TypeError: The loader has no state.
            CheckpointError: A checkpoint could not be restored, or the save before this one has failed.
            KeyboardInterrupt: After an interrupt, once saved.
            SystemExit: After SIGTERM, once saved (code 143).
        """
        if epochs < 1:
            msg = f"epochs={epochs}: how many times to go through the data, at least 1"
            raise ValueError(msg)
        data = self._training.data
        if loader is None and data is None:
            msg = "steps() needs a loader: CheckpointManager(..., data=loader)"
            raise ValueError(msg)
        if data is None:
            self._training.set_data(loader)
        elif loader is not None and loader is not data:
            msg = "steps(loader) goes through what is saved: give the loader that the manager was given as data"
            raise ValueError(msg)
        return self._steps(epochs)

    def _steps(self, epochs: int) -> Iterator[tuple[int, Any]]:
        ranks, _ = self._connect()
        if not self._has_restored and self.restore() is None and self._training.is_on_any_grid:
            self._training.data.set_epoch(0)  # a loader that a cell before has used up is no training that is done
        if self._epochs() >= epochs:
            self._say(f"nothing to do: {self._epochs()} of {epochs} epochs done (step {self._step})")
            return
        with listening() as stop, marked_as_saving(ranks.rank):
            boundary = Boundary(ranks, self._schedule, self._step)
            while self._epochs() < epochs:
                batches = self._begin_epoch()
                for batch in batches:
                    yield self._step, batch
                    self._step += 1
                    self._between_steps(boundary, stop)
                # A rank whose data ended before that of the others finds out here, not in a collective that hangs.
                self._between_steps(boundary, stop, is_end=True)
                self._epochs_done += 1
            if self._saved_step != self._step or self._saved_epochs != self._epochs():
                self.save(self._step)
            self.wait()
            if stop.reason is not StopReason.NONE:
                raise stop.taken()

    def _begin_epoch(self) -> Iterator[Any]:
        loader = self._training.data
        if not self._training.is_on_any_grid:
            for name in ("sampler", "dataset"):
                set_epoch = getattr(getattr(loader, name, None), "set_epoch", None)
                if set_epoch is not None:
                    set_epoch(self._epochs_done)
        batches: Iterator[Any] = iter(loader)
        # Loaders draw from the generators when they begin; in the run that was saved, this one had begun already.
        if self._rng is not None:
            self._rng.apply()
            self._rng = None
        return batches

    def _epochs(self) -> int:
        """Epochs completed: after its last batch our loader is at the start of the next epoch, others are not."""
        return int(self._training.data.epoch) if self._training.is_on_any_grid else self._epochs_done

    def _between_steps(self, boundary: Boundary, stop: StopRequest, *, is_end: bool = False) -> None:
        _, saver = self._connect()
        verdict = boundary.decide(self._step, stop.reason, failed=saver.has_failed, is_end=is_end)
        if verdict.failed:
            self.wait()
            msg = "a save has failed on another rank, which says why; what was saved before is as it was"
            raise CheckpointError(msg)
        if verdict.stop is not StopReason.NONE:
            self._stop(verdict.stop, stop)
        if verdict.save:
            self.save(self._step)
        elif not self._is_prepared:
            self._prepare(saver)

    def _prepare(self, saver: Saver) -> None:
        """Let the memory for copies be there before the first save: after a step, when the optimizer has its state."""
        self._is_prepared = True
        if self._asynchronous and self._schedule.is_regular:
            saver.prepare(self._training.tensors())

    def _stop(self, reason: StopReason, request: StopRequest) -> None:
        """Save, if there is time, and end the loop as the signal would have done."""
        _, saver = self._connect()
        remaining_s = request.remaining_s(stop_grace_s())
        name = "interrupted" if reason is StopReason.INTERRUPT else "terminated"
        message = f"{name} after step {self._step}: saving (at most {remaining_s:.0f} s); again to stop at once"
        self._tell(CheckpointEvent(EventKind.STOPPING, self._step, None, message))
        self._say(message)
        if saver.report is not None and saver.report.seconds > remaining_s:
            self._say(f"the last save took {saver.report.seconds:.0f} s: this one may not be done in time")
        try:
            if self._saved_step != self._step:
                self.save(self._step)
            is_saved = saver.wait(request.remaining_s(stop_grace_s()))
        except CheckpointError as error:
            self._say(f"step {self._step} was not saved: {error}")
            raise request.taken(reason) from error
        self._say(f"saved step {self._step}" if is_saved else f"step {self._step} was not saved in time")
        raise request.taken(reason)

    # ---------------------------------------------------------------------------------------------------- by hand

    def save(self, step: int, *, wait: bool = False) -> None:
        """Save a checkpoint, once the one in flight is done. Collective: every rank calls.

        In a loop of your own: after the optimizer's step, with the number of steps completed.

        Args:
            step: Number of steps completed.
            wait: Return when it is committed.

        Raises:
            CheckpointError: Something can't be saved, or this save (with ``wait``) or the one before has failed.
            ValueError: The step is negative.
        """
        if step < 0:
            msg = f"step={step}: the number of steps completed"
            raise ValueError(msg)
        ranks, saver = self._connect()
        began_at_s = time.monotonic()
        self.wait()
        self._schedule.began(began_at_s)
        snapshot = self._collect(step, ranks)
        epochs_done = self._epochs_done if snapshot.data is None else int(snapshot.data["epoch"])
        saver.save(
            step,
            snapshot,
            rng=rng.capture(),
            extra={"epochs_done": epochs_done},
            background=self._asynchronous and not wait,
            began_at_s=began_at_s,
        )
        self._saved_step, self._saved_epochs = step, epochs_done

    def _collect(self, step: int, ranks: Ranks) -> Snapshot:
        snapshot: Snapshot | None = None

        def collect() -> str:
            nonlocal snapshot
            snapshot = self._training.collect()
            return snapshot.digest()

        digests = ranks.agree(f"save step {step}", collect)
        assert snapshot is not None
        if len(set(digests)) > 1:
            odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            msg = (
                f"step {step} was not saved: ranks {odd} have other tensors, or tensors of another shape, than rank 0; "
                "the model and the optimizer must be the same on all ranks (sharded is the same)"
            )
            raise CheckpointError(msg)
        return snapshot

    def restore(self, path: str | os.PathLike[str] | None = None) -> int | None:
        """Restore the newest checkpoint that is whole. Collective: every rank calls.

        One that is damaged is passed over for the one before it, with an event; nothing is touched before every byte
        is checked on all ranks.

        Args:
            path: Of one checkpoint, or its name in the root: that one or none. By default as ``resume`` says.

        Returns:
            The number of steps completed; None: there is no checkpoint, start afresh.

        Raises:
            CheckpointNotFoundError: There is none, and there must be.
            CheckpointDamagedError: There are some, and all are damaged: training does not silently start afresh.
            CheckpointMismatchError: It is of another training, or of a newer air_nb.
            DataError: The data set is not the one that it was saved with.
            CheckpointError: The ranks could not restore it together.
        """
        ranks, _ = self._connect()
        self.wait()
        began_at_s = time.monotonic()
        chosen = Resume.chosen(self._resume) if path is None else os.fspath(path)
        self._has_restored = True
        if chosen is Resume.NEVER:
            return None
        if isinstance(chosen, Resume):
            found = restore.newest(self._root, self._training, ranks, tell=self._tell)
            if found is None and chosen is Resume.MUST:
                msg = f"there is no checkpoint in {self._root}, and resume is 'must'; 'auto' starts afresh then"
                raise CheckpointNotFoundError(msg)
        else:
            found = restore.one(self._path_of(chosen), self._training, ranks)
        if found is None:
            return None
        self._go_on_from(found, time.monotonic() - began_at_s)
        return found.step

    def _path_of(self, text: str) -> str:
        """A checkpoint by its path, or by its name in the root."""
        return open_store(self._root).child(text).url if "/" not in text else text

    def _go_on_from(self, found: Restored, seconds: float) -> None:
        ranks, _ = self._connect()
        found.rng.apply()
        self._rng = found.rng
        self._step = self._saved_step = found.step
        self._epochs_done = self._saved_epochs = int(found.extra.get("epochs_done", 0))
        self._schedule.began(time.monotonic())
        message = f"resumed step {found.step} from {found.path}"
        self._tell(CheckpointEvent(EventKind.RESTORED, found.step, found.path, message, seconds=seconds))
        self._say(f"{message}; --resume never (or resume='never') starts afresh")
        if found.left_out:
            self._say(f"not restored, as the manager was not given it: {', '.join(found.left_out)}")
        if ranks.world_size > found.world_size:
            self._say(
                f"it was saved by {found.world_size} of the {ranks.world_size} ranks: the random numbers of the others "
                "are derived from those of rank 0"
            )

    def wait(self) -> None:
        """Wait until the save in flight, if any, is committed. Collective: every rank calls.

        Raises:
            CheckpointError: It failed; what was saved before is as it was.
        """
        if self._connection is not None:
            _, saver = self._connection
            try:
                saver.wait()
            except CheckpointError:
                self._saved_step = None
                raise
            if saver.report is not None:
                self._schedule.measured(stall_s=saver.report.stall_s, seconds=saver.report.seconds)

    def close(self) -> None:
        """Wait for the save in flight, and let go of the process groups. Collective: every rank calls.

        Raises:
            CheckpointError: The save failed.
        """
        try:
            self.wait()
        finally:
            if self._connection is not None:
                self._connection[0].close()
                self._connection[1].close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:  # else other ranks may never come to where they would wait for this one
            self.close()

    @property
    def root(self) -> str:
        """Directory or URL of all checkpoints."""
        return self._root

    @property
    def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint that can be restored, as far as sizes tell; None if there is none."""
        return find_latest_valid(self._root)

    @property
    def last_save(self) -> SaveReport | None:
        """What the newest committed save of this manager took; None before there is one."""
        return None if self._connection is None else self._connection[1].report

    # ------------------------------------------------------------------------------------------------------ parts

    def _connect(self) -> tuple[Ranks, Saver]:
        """The ranks and what saves; made when first needed, as the process group may be initialised after us."""
        if self._connection is None:
            ranks = Ranks(timeout_s=self._timeout_s)
            saver = Saver(self._root, Ranks(timeout_s=self._timeout_s), keep=self._keep, notify=self._tell)
            self._connection = ranks, saver
            ranks.broadcast(f"look into {self._root}", saver.watch)
        return self._connection

    def _tell(self, event: CheckpointEvent) -> None:
        ranks, _ = self._connect()
        if self._on_event is None or not ranks.is_first:
            return
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001 - the border to the user's code: a save must not fail because a report of it does
            _log.exception("on_event failed for: %s", event.message)

    def _say(self, text: str) -> None:
        if self._connect()[0].is_first:
            say(text)


def _default_root() -> str:
    chosen = os.environ.get("AIR_NB_CHECKPOINT_ROOT")
    return chosen or str(Path.cwd() / "checkpoints" / os.environ.get("AIR_NB_RUN_NAME", "default"))
