"""Lines of several ranks become one sequence: equal lines are folded, each rank's own order is kept.

Pure. Every rank has a queue; only the heads of the queues can fold. When heads differ, a line that another rank has
further down its queue is held until that rank gets there: an extra line of rank 0 then doesn't stop all later lines
from folding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Literal, NamedTuple

from air_nb.protocol.events import Rich, StreamName

__all__ = ["Folder", "Item", "Released", "label"]

_LOOKAHEAD = 16


class Item(NamedTuple):
    """One line or one rich message of a rank; two of them are equal when ``text`` and ``stream`` are."""

    text: str
    stream: StreamName | Literal["rich"]
    at: float
    rich: Rich | None = None
    bar: bool = False


class Released(NamedTuple):
    """Equal items of ``ranks`` (ascending, never empty), to be shown as one."""

    ranks: tuple[int, ...]
    items: tuple[Item, ...]


@cache
def label(ranks: tuple[int, ...]) -> str:
    """``[0,2-3]`` for ranks 0, 2 and 3 (ascending)."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return "[" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "]"


class Folder:
    """The queues of all ranks.

    Args:
        ranks: How many.
        wait_s: How long a line waits for the ranks that have not printed, counted from when all have begun.
        start_s: How long lines wait at most for ranks that have not begun.
        look_s: How long differing lines wait for more, to find out which rank is ahead.
        max_queued: Lines of one rank that may wait.
        max_chars: Characters of one rank that may wait.
    """

    def __init__(
        self, ranks: int, *, wait_s: float, start_s: float, look_s: float, max_queued: int, max_chars: int
    ) -> None:
        self.look_ahead = True
        self._queues: list[deque[Item]] = [deque() for _ in range(ranks)]
        self._chars = [0] * ranks
        self._running = set(range(ranks))
        self._not_begun = set(range(ranks))
        self._all_began_at: float | None = None
        self._first_at: float | None = None
        self._wait_s = wait_s
        self._start_s = start_s
        self._look_s = look_s
        self._max_queued = max_queued
        self._max_chars = max_chars
        self._deadline: float | None = None

    def push(self, rank: int, items: Sequence[Item]) -> None:
        """Queue what this rank has made."""
        self._queues[rank].extend(items)
        self._chars[rank] += sum(len(item.text) for item in items)

    def begin(self, rank: int, now: float) -> None:
        """This rank has begun with the cell."""
        if self._first_at is None:
            self._first_at = now
        self._not_begun.discard(rank)
        if not self._not_begun and self._all_began_at is None:
            self._all_began_at = now

    def end(self, rank: int) -> None:
        """Nothing more comes from this rank; the others no longer wait for it."""
        self._running.discard(rank)

    def queued(self, rank: int) -> deque[Item]:
        """What of this rank is still waiting, oldest first (the queue itself: do not change it)."""
        return self._queues[rank]

    def drop(self, rank: int) -> list[Item]:
        """Forget what of this rank is waiting and return it."""
        dropped = list(self._queues[rank])
        self._queues[rank].clear()
        self._chars[rank] = 0
        return dropped

    def deadline(self) -> float | None:
        """When ``release`` has something to do even if nothing is pushed."""
        return self._deadline

    def release(self, now: float) -> Iterator[Released]:
        """Take out what is ready, in order. ``look_ahead`` may be switched off between two of them."""
        while True:
            heads = [(rank, queue[0]) for rank, queue in enumerate(self._queues) if queue]
            if not heads:
                self._deadline = None
                return
            chosen = self._choose(heads, now)
            if not chosen:
                return
            for ranks in chosen:
                yield Released(tuple(ranks), tuple(map(self._pop, ranks)))

    def _pop(self, rank: int) -> Item:
        item = self._queues[rank].popleft()
        self._chars[rank] -= len(item.text)
        return item

    def _choose(self, heads: list[tuple[int, Item]], now: float) -> list[list[int]]:
        """Groups of ranks whose equal heads may go now; sets the deadline if there are none."""
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, item in heads:
            groups.setdefault((item.text, item.stream), []).append(rank)
        waiting = any(not self._queues[rank] for rank in self._running)
        if not waiting and (len(groups) == 1 or not self.look_ahead):
            return list(groups.values())
        expired = {rank for rank, item in heads if self._is_expired(rank, item, now)}
        if not expired:
            if waiting:
                self._deadline = min(self._due_at(item) for _, item in heads)
                return []
            look_until = max(item.at for _, item in heads) + self._look_s
            if now < look_until and any(len(self._queues[rank]) <= _LOOKAHEAD for rank in self._running):
                self._deadline = look_until
                return []
        free = list(groups.values())
        if self.look_ahead and len(groups) > 1:
            free = [ranks for key, ranks in groups.items() if not self._is_ahead(key, ranks)]
        if waiting:
            # Only what has waited long enough goes, and what stands in its way.
            return [ranks for ranks in free if not expired.isdisjoint(ranks)] or free or [next(iter(groups.values()))]
        return free or [next(iter(groups.values()))]

    def _due_at(self, item: Item) -> float:
        """When a line goes without the ranks that have not printed it."""
        if self._all_began_at is not None:
            return max(item.at, self._all_began_at) + self._wait_s
        first_at = item.at if self._first_at is None else self._first_at
        return max(item.at + self._wait_s, first_at + self._start_s)

    def _is_expired(self, rank: int, item: Item, now: float) -> bool:
        return (
            now >= self._due_at(item)
            or len(self._queues[rank]) > self._max_queued
            or self._chars[rank] > self._max_chars
        )

    def _is_ahead(self, key: tuple[str, str], ranks: list[int]) -> bool:
        """Whether another rank has this line too, but others before it."""
        return any(
            (item.text, item.stream) == key
            for rank, queue in enumerate(self._queues)
            if rank not in ranks
            for item in islice(queue, 1, _LOOKAHEAD + 1)
        )
