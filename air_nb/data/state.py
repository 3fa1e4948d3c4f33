"""What ``DataLoader.state_dict`` returns, read with care. Pure.

A JSON-able dictionary that is equal on all ranks and says nothing about how many there were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from air_nb.data.position import Position
from air_nb.errors import DataError, ManifestChangedError

__all__ = ["OnChange", "State"]

_VERSION = 1


class OnChange(StrEnum):
    """What is done when the data set is not the one that the state was saved of."""

    ERROR = "error"
    """Refuse."""
    APPEND = "append"
    """If the new items come after all the others: finish the epoch without them, they are in the next one."""
    IGNORE = "ignore"
    """Go on at the same position among the items of now: some may come twice in this epoch, or not at all."""


@dataclass(frozen=True, slots=True)
class State:
    """A position, and what it is a position in.

    Attributes:
        position: What has been consumed.
        kind: ``"strict"``: one example per item; ``"stream"``: any number.
        seed: Seed of the order.
        shuffle: Whether the order is shuffled.
        items: Number of work items in this epoch.
        manifest: Hash of the files, None for a data set that has none.
        skipped: Why items could not be read, by item.
    """

    position: Position
    kind: str
    seed: int
    shuffle: bool
    items: int
    manifest: str | None
    skipped: Mapping[int, str] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        """The JSON-able form."""
        return {
            "version": _VERSION,
            "kind": self.kind,
            "epoch": self.position.epoch,
            "position": self.position.position,
            "done": [list(span) for span in self.position.done],
            "partial": [list(pair) for pair in self.position.partial.items()],
            "seed": self.seed,
            "shuffle": self.shuffle,
            "items": self.items,
            "manifest": self.manifest,
            "skipped": [list(pair) for pair in sorted(self.skipped.items())],
        }

    @classmethod
    def decode(cls, state: Mapping[str, Any]) -> State:
        """Read the JSON-able form.

        Raises:
            DataError: It is of a newer version, or not a state of this loader.
        """
        try:
            version = state["version"]
            if version > _VERSION:
                msg = (
                    f"the data state has format version {version}; this air_nb reads up to {_VERSION}: "
                    "it was saved by a newer one, install that"
                )
                raise DataError(msg)
            return cls(
                position=Position(
                    int(state["epoch"]),
                    int(state["position"]),
                    tuple((int(start), int(stop)) for start, stop in state["done"]),
                    {int(at): int(examples) for at, examples in state["partial"]},
                ),
                kind=state["kind"],
                seed=state["seed"],
                shuffle=state["shuffle"],
                items=state["items"],
                manifest=state["manifest"],
                skipped=dict(state["skipped"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            msg = f"this is no state of an air_nb DataLoader ({type(error).__name__}: {error}): {str(state)[:200]}"
            raise DataError(msg) from error

    def require_same_order(self, loader: State) -> None:
        """Refuse a state that means other samples than the loader that is to go on from it.

        At the start of an epoch the two may differ: nothing of it has been consumed.

        Raises:
            DataError: Another kind of data set, seed or shuffle.
        """
        if self.position.at_start:
            return
        if self.kind != loader.kind:
            msg = f"the data state is of a {self.kind!r} data set, this one is {loader.kind!r}: take the one it is of"
            raise DataError(msg)
        for name in ("seed", "shuffle"):
            saved, given = getattr(self, name), getattr(loader, name)
            if saved != given:
                msg = (
                    f"the data state was saved with {name}={saved!r}, this loader has {name}={given!r}: in the middle "
                    f"of epoch {self.position.epoch} that order can't go on. Give DataLoader {name}={saved!r}"
                )
                raise DataError(msg)

    def on(self, now: State, on_change: OnChange, prefix_hash: Callable[[int], str | None]) -> State:
        """The state to go on from with the items of now.

        Args:
            now: What the loader has.
            on_change: What to do if that is not what this state was saved of.
            prefix_hash: The manifest's hash of now, of so many first items.

        Raises:
            ManifestChangedError: They differ in a way that ``on_change`` does not allow.
        """
        if (self.items, self.manifest) == (now.items, now.manifest):
            return self
        if on_change is OnChange.IGNORE:
            return replace(self, items=now.items, manifest=now.manifest, position=self.position.clipped(now.items))
        appended = now.items >= self.items and prefix_hash(self.items) == self.manifest
        if on_change is OnChange.APPEND and appended:
            if self.position.at_start:
                return replace(self, items=now.items, manifest=now.manifest)
            return self
        what = f"{self.items} items then, {now.items} now" if self.items != now.items else "other names, sizes or dates"
        how = ", all new ones after the others: on_change='append' leaves them for the next epoch" if appended else ""
        msg = (
            f"the data set has changed since the state was saved ({what}{how}): epoch {self.position.epoch} can't go "
            "on with each item once. Bring the files back, or on_change='ignore' goes on at the same position"
        )
        raise ManifestChangedError(msg)
