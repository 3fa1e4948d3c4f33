"""``DataLoader``: torch's, with an order and a position of its own.

It runs in the rank, and is used by one thread. What has been delivered is known here and nowhere else: loader workers
are told what to read, and are told anew after a restart, however many there are then.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from air_nb.data import settings as settle
from air_nb.data.agree import Ranks, find_ranks, require_equal
from air_nb.data.feed import Feed, FeedOptions
from air_nb.data.items import Collate, ItemSource, Notes, OnError, Reader, release
from air_nb.data.leases import Lease
from air_nb.data.meter import LoaderMetrics, Meter
from air_nb.data.order import Order
from air_nb.data.partition import Split, Tail
from air_nb.data.passes import Batch, StreamPass, StrictPass
from air_nb.data.position import Position, Progress, merge
from air_nb.data.settings import Kind, Settings
from air_nb.data.state import OnChange, State
from air_nb.data.stream import Deal, StreamSource
from air_nb.data.workers import default_num_workers
from air_nb.errors import DataError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["DataLoader"]


class DataLoader:
    """torch's DataLoader that resumes at the exact sample, on any number of ranks and loader workers.

    It takes torch's keyword arguments, and splits the data over the ranks itself: no DistributedSampler, no
    ``set_epoch``. Each pass (``for batch in loader``) is over a whole epoch; the first one after ``load_state_dict`` is
    over what was left of the epoch then. A pass that is left early is not gone on with: the next one is over the next
    epoch, as with torch (``loader.load_state_dict(loader.state_dict())`` goes on with it). One iterator at a time: an
    older one raises.

    Ranks are those of ``process_group``, else of the job's default group, else of RANK and WORLD_SIZE in the
    environment, else there is one. Making an iterator is collective where there is a process group: all ranks must mean
    the same, or all raise. Give ``rank=0, world_size=1`` for a loader that only one rank uses.

    Args:
        dataset: Anything with a length and ``__getitem__``, a ``FileDataset``, or a ``Checkpointable``.
        batch_size: Rows of a batch on each rank; None: single examples.
        shuffle: Whether each epoch has an order of its own; None: as the data set says, else False.
        seed: Seed of that order, and of random numbers in examples; None: that of ``generator``, of the data set, or 0.
        tail: ``"exact"``: each example once, the last batches may be smaller, and a rank with none left repeats one;
            ``"pad"``: they are filled with repeated rows; ``"drop"``: they are left out. ``valid`` tells repeated rows.
        num_workers: Loader workers of each rank; None: what cores and /dev/shm allow, at most 8, and 0 for data in
            memory.
        on_error: An item that can't be read: ``"raise"`` names it, ``"skip"`` leaves it out and lists it in the state,
            ``"retry"`` tries it three times.
        on_change: The data set is not the one a state was saved of: ``"error"``, ``"append"`` (new items at the end are
            left for the next epoch), ``"ignore"``.
        seed_examples: Seed Python's, numpy's and torch's generators before each example, so that augmentation is the
            same on any number of ranks and workers; some 10 µs each, once anything draws. False: torch's, per worker.
        drop_last: The same as ``tail="drop"``.
        generator: Only its seed is used.
        process_group: The ranks that share the data: those of one data-parallel group.
        rank: This rank, with ``world_size``; no rank is asked then.
        world_size: Number of ranks.
        collate_fn: As torch's, also for ``batch_size=None``.
        pin_memory: As torch's.
        timeout: As torch's.
        worker_init_fn: As torch's.
        multiprocessing_context: As torch's.
        prefetch_factor: As torch's.
        persistent_workers: As torch's.
        sampler: Refused: the order is this loader's.
        batch_sampler: Refused.
        in_order: False is refused.

    Raises:
        ValueError: An argument is out of range, or two contradict each other.
        TypeError: The data set can't be gone on with after a restart.
    """

    def __init__(  # noqa: PLR0913  # torch's own arguments, and ours
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,  # noqa: FBT001  # as torch's
        *,
        seed: int | None = None,
        tail: str = "exact",
        num_workers: int | None = None,
        on_error: str = "raise",
        on_change: str = "error",
        seed_examples: bool = True,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        process_group: dist.ProcessGroup | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        in_order: bool = True,
    ) -> None:
        settle.refuse_samplers(sampler, batch_sampler, in_order=in_order)
        settle.check_numbers(batch_size, num_workers, (rank, world_size))
        workers = default_num_workers(dataset) if num_workers is None else num_workers
        self.dataset = dataset
        self._settings = Settings(
            kind=settle.kind_of(dataset),
            batch_size=batch_size or 1,
            single=batch_size is None,
            shuffle=settle.chosen_shuffle(shuffle, dataset),
            seed=settle.chosen_seed(seed, generator, dataset),
            tail=settle.chosen_tail(tail, drop_last=drop_last),
            on_error=settle.one_of(OnError, "on_error", on_error),
            on_change=settle.one_of(OnChange, "on_change", on_change),
            # Paths are not drawn: whoever decodes them does that in the training loop.
            seed_examples=seed_examples and getattr(dataset, "decode", True) is not None,
            asked_num_workers=num_workers,
            num_workers=workers,
        )
        self._group, self._rank, self._world_size = process_group, rank, world_size
        self._reader = Reader(
            dataset,
            self._settings.seed,
            self._settings.seed_examples,
            self._settings.on_error,
            Collate(collate_fn, single=batch_size is None),
        )
        only_with_workers = {
            "timeout": timeout,
            "multiprocessing_context": multiprocessing_context,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        # Where we chose to have no workers, what is meant for workers is not the user's mistake.
        arguments = {} if num_workers is None and workers == 0 else only_with_workers
        source = ItemSource if self._settings.kind is Kind.STRICT else StreamSource
        self._feed = Feed(
            source(self._reader),
            FeedOptions(workers, {"pin_memory": pin_memory, **arguments}, worker_init_fn),
        )
        self._base = Position()  # strict: what was consumed; stream: what had been when the pass began
        self._progress: list[Progress] | None = None  # stream: what this rank has consumed since
        self._left_early = False  # unless the pass goes on: some of the epoch was delivered, the rest was not
        self._frozen: State | None = None  # the epoch goes on with the items that it began with
        self._skipped: dict[int, str] = {}
        self._current: weakref.ref[_Iterator] | None = None
        self._passes = 0
        self._valid: tuple[bool, ...] = ()
        self._meter = Meter()

    # ------------------------------------------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass. Collective: every rank calls.

        Raises:
            DataError: The ranks don't mean the same, and all of them raise; or the data set is empty.
            ValueError: ``tail="drop"`` leaves no batch of a whole epoch.
        """
        self._stop_current("another iterator of the same DataLoader was made: only the newest one goes on")
        if self._left_early:
            self._go_to(self._base.next_epoch())
        ranks = self._ranks()
        self._agree(ranks)
        if len(self.dataset) == 0:  # after agreeing: else a rank whose disk has no files would leave the others waiting
            msg = f"the data set ({type(self.dataset).__name__}) is empty: there is nothing to train on"
            raise DataError(msg)
        pass_ = self._strict_pass(ranks) if self._settings.kind is Kind.STRICT else self._stream_pass(ranks)
        iterator = _Iterator(self, pass_, self._base.epoch)
        self._current = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """Number of steps of a whole epoch.

        Raises:
            TypeError: Items yield any number of examples.
        """
        if self._settings.kind is Kind.STREAM:
            msg = f"items of {type(self.dataset).__name__} yield any number of examples: nobody knows how many steps"
            raise TypeError(msg)
        return self._split(self._ranks(), len(self.dataset)).steps(0)

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch on each rank; None: single examples."""
        return None if self._settings.single else self._settings.batch_size

    @property
    def num_workers(self) -> int:
        """Number of loader workers of this rank."""
        return self._settings.num_workers

    @property
    def drop_last(self) -> bool:
        """Whether rows that make no full batch on all ranks are left out."""
        return self._settings.tail is Tail.DROP

    @property
    def valid(self) -> torch.Tensor:
        """Which rows of the newest batch count: bool [local batch]; False for rows that only fill it."""
        return torch.tensor(self._valid, dtype=torch.bool)

    @property
    def epoch(self) -> int:
        """Number of the epoch that the pass is over, or that the next one begins with."""
        iterator = self._iterator()
        return self._base.epoch if iterator is None else iterator.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; one that is the next anyhow is gone on with."""
        if epoch != self._base.epoch or (self._left_early and self._iterator() is None):
            self._go_to(Position(epoch))

    def metrics(self) -> LoaderMetrics:
        """What this loader has done on this rank since it was made."""
        return self._meter.metrics(len(self._skipped))

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What has been delivered: JSON-able, equal on all ranks, and good for any number of them.

        Collective where items yield any number of examples, and with ``on_error="skip"``: every rank calls.

        Raises:
            DataError: Ranks that can't talk to each other share a data set whose items yield any number of examples.
        """
        position = self._base if self._progress is None else self._merged(self._progress)
        return self._state(position, self._all_skipped()).encode()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the next pass is over what is left of its epoch.

        Raises:
            DataError: It is of a newer version, or of another order than this loader's.
            ManifestChangedError: The data set has changed.
        """
        saved = State.decode(state)
        now = self._state_now(Position(), {})
        saved.require_same_order(now)
        adapted = saved.on(now, self._settings.on_change, self._prefix_hash)
        self._stop_current("load_state_dict() was called after this iterator was made: make a new one")
        self._go_to(adapted.position)
        self._frozen = adapted if (adapted.items, adapted.manifest) != (now.items, now.manifest) else None
        self._skipped = dict(adapted.skipped)

    def _state(self, position: Position, skipped: Mapping[int, str]) -> State:
        """A state of the items that the position's epoch has."""
        state = self._state_now(position, skipped)
        frozen = self._frozen
        if frozen is not None and frozen.position.epoch == position.epoch:
            return replace(state, items=frozen.items, manifest=frozen.manifest)
        return state

    def _state_now(self, position: Position, skipped: Mapping[int, str]) -> State:
        """A state of the items that the data set has now."""
        manifest = getattr(self.dataset, "manifest", None)
        return State(
            position=position,
            kind=str(self._settings.kind),
            seed=self._settings.seed,
            shuffle=self._settings.shuffle,
            items=len(self.dataset),
            manifest=None if manifest is None else manifest.hash,
            skipped=skipped,
        )

    def _prefix_hash(self, n_items: int) -> str | None:
        manifest = getattr(self.dataset, "manifest", None)
        return None if manifest is None else str(manifest.prefix_hash(n_items))

    def _merged(self, mine: list[Progress]) -> Position:
        """What all ranks have consumed. Collective: every rank calls."""
        ranks = self._ranks()
        iterator = self._iterator()
        # Reading ahead tells whether the epoch is over: its end is the start of the next one.
        over = iterator is not None and iterator.is_over()
        progress = [one for others in ranks.gather(mine) for one in others]
        items = self._items()
        position = merge(self._base, items, progress)
        return position.next_epoch() if over or position.position >= items else position

    def _all_skipped(self) -> dict[int, str]:
        """What all ranks have skipped. Collective with ``on_error="skip"``."""
        ranks = self._ranks()
        if self._settings.on_error is not OnError.SKIP or not ranks.can_talk:
            return self._skipped
        return {item: reason for skipped in ranks.gather(self._skipped) for item, reason in skipped.items()}

    # -------------------------------------------------------------------------------------------------------- passes

    def _ranks(self) -> Ranks:
        return find_ranks(self._group, self._rank, self._world_size)

    def _items(self) -> int:
        return self._state(self._base, {}).items

    def _order(self) -> Order:
        return Order(self._items(), self._settings.seed, self._base.epoch, self._settings.shuffle)

    def _split(self, ranks: Ranks, items: int) -> Split:
        return Split(items, self._settings.batch_size, ranks.rank, ranks.world_size, self._settings.tail)

    def _agree(self, ranks: Ranks) -> None:
        if not ranks.can_talk:
            if self._settings.kind is Kind.STREAM:
                msg = (
                    f"rank {ranks.rank} of {ranks.world_size} can't talk to the others: where items yield any number "
                    "of examples they agree at each step. Initialise torch.distributed first, or pass process_group"
                )
                raise DataError(msg)
            return
        settings = self._settings
        facts = {
            "batch_size": self.batch_size,
            "num_workers": settings.asked_num_workers,  # a default may well differ between machines
            "tail": str(settings.tail),
            "on_error": str(settings.on_error),
            "seed_examples": settings.seed_examples,
            **self._state(self._base, {}).encode(),
        }
        advice = "Give DataLoader the same arguments, data set and state on every rank"
        require_equal("their DataLoader", ranks.gather(facts), advice)

    def _strict_pass(self, ranks: Ranks) -> StrictPass:
        split = self._split(ranks, self._items())
        if self._base.at_start and split.steps(0) == 0:
            msg = (
                f"tail='drop' leaves no batch: {split.items} items are fewer than the {split.step_size} of one step "
                f"({split.world_size} ranks x batch_size {split.batch_size}). A smaller batch_size, or tail='exact'"
            )
            raise ValueError(msg)
        return StrictPass(self._feed, self._reader, split, self._order(), self._base)

    def _stream_pass(self, ranks: Ranks) -> StreamPass:
        self._passes += 1
        deal = Deal(self._passes, self._order(), self._base, ranks.rank, ranks.world_size, self._settings.batch_size)
        workers = max(1, self._settings.num_workers)
        pass_ = StreamPass(self._feed, self._reader, deal, tail=self._settings.tail, num_workers=workers, ranks=ranks)
        self._progress = pass_.progress
        return pass_

    def _iterator(self) -> _Iterator | None:
        """The iterator whose pass goes on."""
        iterator = self._current() if self._current is not None else None
        return iterator if iterator is not None and iterator.is_open else None

    def _stop_current(self, reason: str) -> None:
        iterator = self._iterator()
        if iterator is not None:
            iterator.stop(reason)

    def _go_to(self, position: Position) -> None:
        self._base = position
        self._progress = None
        self._left_early = False

    def _count(self, pass_: StrictPass | StreamPass, batch: Batch, asked_at: float) -> None:
        """A batch is about to be given to the loop."""
        if isinstance(pass_, StrictPass):
            self._base = pass_.position
        self._left_early = not (isinstance(pass_, StrictPass) and self._base.at_start)
        self._valid = batch.notes.valid
        self._note_skipped(batch.notes)
        self._meter.add(batch.notes, asked_at)
        # Without loader workers the data set tells it itself.
        if batch.notes.cache is not None and self._meter.cache is not None and self._settings.num_workers:
            self.dataset.show_progress(self._meter.cache)

    def _ended(self, pass_: StrictPass | StreamPass, epoch: int) -> None:
        """A pass has come to its end."""
        if isinstance(pass_, StreamPass) or self._base.epoch == epoch:
            self._go_to(Position(epoch + 1))

    def _note_skipped(self, notes: Notes) -> None:
        for failure in notes.failures:
            if failure.item not in self._skipped:
                warnings.warn(f"skipped {failure.text}", RuntimeWarning, stacklevel=4)
            self._skipped[failure.item] = failure.text


class _Iterator:
    """A pass as the loop sees it: it ends once, holds the pins of the newest batch, and can be stopped from outside."""

    def __init__(self, loader: DataLoader, pass_: StrictPass | StreamPass, epoch: int) -> None:
        self._loader = loader
        self._pass = pass_
        self.epoch = epoch
        self.is_open = True
        self._stopped: str | None = None
        self._leases: tuple[Lease, ...] = ()

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        if self._stopped is not None:
            raise RuntimeError(self._stopped)
        release(self._leases)
        self._leases = ()
        if not self.is_open:
            raise StopIteration
        asked_at = time.perf_counter()
        try:
            batch = self._pass.advance()
        except StopIteration as error:
            self.close()
            msg = "collate_fn raised StopIteration, which would end the epoch unnoticed"
            raise RuntimeError(msg) from error
        except BaseException:
            self.close()  # what comes after would not be what the position says
            raise
        if batch is None:
            self._loader._ended(self._pass, self.epoch)  # noqa: SLF001  # two halves of one thing
            self.close()
            raise StopIteration
        self._leases = batch.notes.leases
        self._loader._count(self._pass, batch, asked_at)  # noqa: SLF001
        return batch.value

    def is_over(self) -> bool:
        """Whether the pass has no more batches. Collective: every rank calls."""
        return isinstance(self._pass, StreamPass) and not self._pass.has_more()

    def stop(self, reason: str) -> None:
        """End it, and say why to whoever asks for another batch."""
        self._stopped = reason
        self.close()

    def close(self) -> None:
        """End the pass."""
        release(self._leases)
        self._leases = ()
        if self.is_open:
            self.is_open = False
            self._loader._feed.close()  # noqa: SLF001
            self._loader._meter.end_pass()  # noqa: SLF001

    def __del__(self) -> None:
        self.close()
