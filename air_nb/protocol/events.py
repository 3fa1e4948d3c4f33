"""What a rank shows: its text, its rich messages, its end.

A rank writes text to ``rank_<r>.out`` and ``.err`` and one JSON line per event to ``rank_<r>.events``; ``runs.logs``
reads the three back in the order in which the rank made them and yields the types below. ``view`` draws them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["BEGAN", "RankBegan", "RankEnded", "RankEvent", "Rich", "StreamName", "Text"]

BEGAN = "began"
"""Kind of the event line that becomes ``RankBegan``."""

StreamName = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text of one rank, cut anywhere (not at line ends), decoded with ``errors="replace"``."""

    rank: int
    stream: StreamName
    text: str


@dataclass(frozen=True, slots=True)
class Rich:
    """A rich message of one rank: figure, HTML, table, clear_output.

    Attributes:
        rank: Who made it.
        kind: Jupyter's message type; ``execute_result`` is the echo of the cell's last expression.
        data: MIME bundle, as in Jupyter messages (binary data base64-encoded).
        metadata: Jupyter's metadata.
        display_id: Id for later updates, as the rank chose it (unique only within the rank).
        wait: For ``clear_output``: clear when the next output comes.
    """

    rank: int
    kind: Literal["display_data", "update_display_data", "execute_result", "clear_output"]
    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None = None
    wait: bool = False


@dataclass(frozen=True, slots=True)
class RankBegan:
    """The rank is up and begins with the cell; until all have, lines of the others wait to be folded with its own."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The rank's process is gone and everything it wrote has been read."""

    rank: int


RankEvent = Text | Rich | RankBegan | RankEnded
