"""What lies in the roots of checkpoints: listed on threads of their own, so that a disk that hangs holds up nobody.

At most one thread (``air_nb-list-checkpoints``) per root and eight at a time, besides those that hang. They are daemons
and nobody joins them: one that waits for a dead file server can't be ended, and only reads.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from air_nb.errors import AirNbError

if TYPE_CHECKING:
    from air_nb.checkpoint.catalog import CheckpointInfo

__all__ = ["Listing", "Roots", "root_of"]

_MAX_THREADS = 8
_MAX_HUNG = 32
_WAIT_S = 0.25
_LOOK_S = 1.0
_REMOTE_LOOK_S = 30.0
_AGAIN_S = 60.0  # a file that has changed its size does not show in any directory's time
_SLOW_S = 10.0
_PENDING = "being listed"

_Signature = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """A root as it was last seen.

    Attributes:
        checkpoints: Newest first.
        problem: Why that is not all, or old; empty if all is well.
        is_pending: Whether nothing is known yet.
    """

    checkpoints: tuple[CheckpointInfo, ...] = ()
    problem: str = ""
    is_pending: bool = False


@dataclass(slots=True)
class _Root:
    """What is known of one root. Changed with the lock held."""

    listing: Listing = field(default_factory=lambda: Listing(problem=_PENDING, is_pending=True))
    recorded: frozenset[str] = frozenset()
    signature: _Signature | None = None
    looked_at: float = -math.inf
    listed_at: float = -math.inf
    is_busy: bool = False


class Roots:
    """See the module. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._roots: dict[str, _Root] = {}

    def listings(self, recorded: Mapping[str, frozenset[str]]) -> dict[str, Listing]:
        """The last known listing of each root, renewed where it is due; waits a moment for those on this machine.

        Args:
            recorded: Paths of checkpoints that runs have committed, by root.
        """
        with self._changed:
            self._roots = {root: self._roots.get(root) or _Root() for root in recorded}
            end = time.monotonic() + _WAIT_S
            started = self._start_due(recorded, end)
            local = [self._roots[root] for root in started if not _is_url(root)]
            self._changed.wait_for(lambda: not any(known.is_busy for known in local), _left_s(end))
            now = time.monotonic()
            return {root: _shown(known, now) for root, known in self._roots.items()}

    def _start_due(self, recorded: Mapping[str, frozenset[str]], end: float) -> list[str]:
        """Start a thread for each root whose time it is, those first that wait longest, and the newest of them."""
        now = time.monotonic()
        due = [root for root, paths in recorded.items() if self._is_due(root, paths, now)]
        due.reverse()  # they come with the oldest first
        started = []
        for root in sorted(due, key=lambda root: self._roots[root].looked_at):
            if not self._changed.wait_for(self._has_room, _left_s(end)):
                break
            known = self._roots[root]
            known.is_busy, known.looked_at, known.recorded = True, time.monotonic(), recorded[root]
            name = "air_nb-list-checkpoints"
            threading.Thread(target=self._list, args=(root, known), name=name, daemon=True).start()
            started.append(root)
        return started

    def _is_due(self, root: str, paths: frozenset[str], now: float) -> bool:
        known = self._roots[root]
        age_s = now - known.looked_at
        has_more = not paths <= known.recorded and age_s > _LOOK_S
        return not known.is_busy and (has_more or age_s > (_REMOTE_LOOK_S if _is_url(root) else _LOOK_S))

    def _has_room(self) -> bool:
        """Threads that hang for long leave theirs to others, up to a bound."""
        busy = [known for known in self._roots.values() if known.is_busy]
        recent = sum(time.monotonic() - known.looked_at < _SLOW_S for known in busy)
        return recent < _MAX_THREADS and len(busy) < _MAX_HUNG

    def _list(self, root: str, known: _Root) -> None:
        signature = None if _is_url(root) else _signature(root)
        is_same = signature is not None and signature == known.signature and not known.listing.problem
        listing = None
        if not is_same or time.monotonic() - known.listed_at > _AGAIN_S:
            listing = _list(root, known.listing)
        with self._changed:
            if listing is not None:
                known.listing, known.signature, known.listed_at = listing, signature, time.monotonic()
            known.is_busy = False
            self._changed.notify_all()


def _left_s(end: float) -> float:
    return max(0.0, end - time.monotonic())


def root_of(path: str) -> str:
    """The root that a checkpoint lies in."""
    return path.rstrip("/").rpartition("/")[0] or "/"


def _is_url(root: str) -> bool:
    return "://" in root


def _signature(root: str) -> _Signature | None:
    """Changes when a checkpoint comes, is committed or goes: then its directory, or the root, has another time."""
    try:
        with os.scandir(root) as entries:
            return tuple(sorted((entry.name, entry.stat().st_mtime_ns) for entry in entries))
    except OSError:  # gone, no directory, not ours: the listing says which
        return None


def _list(root: str, before: Listing) -> Listing:
    from air_nb.checkpoint.catalog import list_checkpoints

    try:
        return Listing(tuple(list_checkpoints(root)))
    except (AirNbError, OSError) as error:
        return Listing(before.checkpoints, f"it can't be listed: {error}")
    except Exception as error:  # noqa: BLE001 - the border of the thread; libraries of object stores raise anything
        return Listing(before.checkpoints, f"it can't be listed: {type(error).__name__}: {error}")


def _shown(known: _Root, now: float) -> Listing:
    if known.is_busy and now - known.looked_at > _SLOW_S and (known.listing.is_pending or not known.listing.problem):
        problem = f"no answer for more than {_SLOW_S:g} s; what is listed is what was there before"
        return Listing(known.listing.checkpoints, problem, known.listing.is_pending)
    return known.listing
