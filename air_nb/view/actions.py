"""What to draw: the output of the pure half of ``view`` and the input of the drawing half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from air_nb.protocol.events import StreamName

__all__ = ["Action", "Clear", "Print", "Show", "Update"]


@dataclass(frozen=True, slots=True)
class Print:
    """Stream text, as ``print`` would write it."""

    stream: StreamName
    text: str


@dataclass(frozen=True, slots=True)
class Show:
    """A new display. ``key`` is its display id, for later updates; None if there will be none."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    key: str | None


@dataclass(frozen=True, slots=True)
class Update:
    """New content for the displays with this key."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    key: str


@dataclass(frozen=True, slots=True)
class Clear:
    """Empty the cell's output; with ``wait``, when the next output comes."""

    wait: bool


Action = Print | Show | Update | Clear
