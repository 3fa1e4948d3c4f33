"""A cell that does with actions what a front end does, so that tests say what a user sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from air_nb.protocol.events import RankBegan, RankEnded, RankEvent, Rich, Text
from air_nb.view.actions import Action, Clear, Print, Show, Update
from air_nb.view.model import CellModel


class Cell:
    """A model, a clock that the test turns, and the outputs of a notebook cell."""

    def __init__(self, ranks=2, mode="merged", *, quiet=False, live=True, begun=True, **options):
        self.model = CellModel(ranks, mode, quiet=quiet, live_bars=live, **options)
        self.now = 100.0
        self.outputs: list[list[Any]] = []
        self.actions: list[Action] = []
        self._clearing = False
        if begun:
            self.feed(*map(RankBegan, range(ranks)))

    def feed(self, *events: RankEvent) -> Cell:
        for event in events:
            self.draw(self.model.feed(event, self.now))
        return self

    def out(self, rank: int, text: str, stream="stdout") -> Cell:
        return self.feed(Text(rank, stream, text))

    def rich(self, rank: int, data: dict[str, Any], kind="display_data", display_id=None, **more) -> Cell:
        return self.feed(Rich(rank, kind, data, {}, display_id, **more))

    def wait(self, seconds: float) -> Cell:
        """Let time pass, ticking whenever the model asks for it."""
        end = self.now + seconds
        for _ in range(10_000):
            due = self.model.next_deadline(self.now)
            if due is None or due > end:
                break
            self.now = max(due, self.now)
            self.draw(self.model.tick(self.now))
        else:
            raise AssertionError("the model asks for ticks without end")
        self.now = end
        return self

    def end(self, *ranks: int) -> Cell:
        return self.feed(*map(RankEnded, ranks))

    def finish(self) -> Cell:
        self.draw(self.model.finish(self.now))
        return self

    def draw(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self.actions.append(action)
            self._apply(action)

    def _apply(self, action: Action) -> None:
        if isinstance(action, Clear):
            self._clearing = action.wait
            if not action.wait:
                self.outputs.clear()
            return
        if self._clearing and not isinstance(action, Update):
            self.outputs.clear()
            self._clearing = False
        if isinstance(action, Print):
            if self.outputs and self.outputs[-1][0] == action.stream:
                self.outputs[-1][1] += action.text
            else:
                self.outputs.append([action.stream, action.text])
        elif isinstance(action, Show):
            self.outputs.append([action.key, action.data])
        else:
            for output in self.outputs:
                if output[0] == action.key:
                    output[1] = action.data

    @property
    def text(self) -> str:
        """Everything as text, a newline after each display."""
        return "".join(
            content if isinstance(content, str) else content.get("text/plain", str(content)) + "\n"
            for _, content in self.outputs
        )

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def prints(self) -> list[Action]:
        return [action for action in self.actions if isinstance(action, Print)]


@pytest.fixture(scope="session")
def make_cell() -> Callable[..., Cell]:
    return Cell
