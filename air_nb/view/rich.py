"""Rich messages of ranks: which are only text, which are equal, and which display of the cell each one belongs to.

Pure. A display id is unique only within its rank, so every one becomes ``<run>-<rank>-<id>``. When several ranks made
the same display it is shown once, for all of them; it is split when one of them changes its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from air_nb.protocol.events import Rich

__all__ = ["WIDGET_VIEW", "Displays", "digest", "plain_text", "without_widget"]

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def without_widget(event: Rich) -> Rich | None:
    """The message with the text of its widget in place of the widget; None if it has none.

    A widget lives in the process that made it, and the front end can only talk to the kernel.
    """
    if WIDGET_VIEW not in event.data:
        return None
    data = {mime: content for mime, content in event.data.items() if mime != WIDGET_VIEW}
    return Rich(event.rank, event.kind, data, event.metadata, event.display_id, event.wait)


def plain_text(event: Rich) -> str | None:
    """Its text, if text is all there is and nobody can ask for a change; else None."""
    if event.kind == "update_display_data" or (event.display_id is not None and event.kind != "execute_result"):
        return None
    text = event.data.get("text/plain")
    return text if isinstance(text, str) and len(event.data) == 1 else None


def digest(event: Rich) -> str:
    """Equal for messages that look the same; display ids are left out, since each rank makes up its own."""
    # The echo of an expression and an explicit display of the same thing are one thing to see.
    kind = "display_data" if event.kind == "execute_result" else event.kind
    content = json.dumps([kind, event.data, event.metadata], sort_keys=True, default=str)
    return hashlib.blake2b(content.encode(errors="replace"), digest_size=16).hexdigest()


class Displays:
    """Which ranks share which display.

    Args:
        name: Prefix of the display ids in the front end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._keys: dict[tuple[int, str], str] = {}
        self._sharers: dict[str, set[int]] = {}
        self._made = 0

    def show(self, events: Sequence[Rich]) -> str | None:
        """Register a new display, made by the ranks of ``events``; its key, or None if it cannot be updated."""
        if events[0].display_id is None:
            return None
        return self._register(events)

    def update(self, events: Sequence[Rich]) -> list[tuple[str, tuple[int, ...], bool]]:
        """Who changes what: ``(key, ranks, is_new)``; with ``is_new`` a display of its own is to be shown for them.

        An id that was never shown is left out, as in a notebook.
        """
        by_key: dict[str, list[Rich]] = {}
        for event in events:
            key = self._keys.get((event.rank, event.display_id or ""))
            if key is not None:
                by_key.setdefault(key, []).append(event)
        changes = []
        for key, members in by_key.items():
            ranks = tuple(event.rank for event in members)
            if self._sharers[key] == set(ranks):
                changes.append((key, ranks, False))
            else:
                changes.append((self._register(members), ranks, True))
        return changes

    def _register(self, events: Sequence[Rich]) -> str:
        first = events[0]
        key = f"{self._name}-{first.rank}-{first.display_id}"
        old = self._sharers.get(key)
        if old is not None and old != {event.rank for event in events}:
            self._made += 1
            key = f"{key}-{self._made}"
        for event in events:
            mine = (event.rank, event.display_id or "")
            before = self._keys.get(mine)
            if before is not None:
                self._sharers[before].discard(event.rank)
            self._keys[mine] = key
        self._sharers[key] = {event.rank for event in events}
        return key
