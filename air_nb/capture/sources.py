"""The text of notebook code that travels, so that ranks have it in their own ``linecache``. Kernel-side, reads only."""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["collect_sources"]


def collect_sources(filenames: Iterable[str], definitions: Iterable[object]) -> dict[str, str]:
    """Texts of what is on no disk, by file name.

    Args:
        filenames: Of the code objects that travel.
        definitions: Functions and classes that travel. A class without methods (a dataclass) has no code that would
            name its file; it is looked up in the newest cell that defines it.
    """
    sources = {filename: text for filename in filenames if (text := _cached_text(filename)) is not None}
    for definition in definitions:
        if isinstance(definition, type) and not any(_defines(text, definition) for text in sources.values()):
            sources.update(_newest_with(definition))
    return sources


def _cached_text(filename: str) -> str | None:
    """The text that IPython put into linecache; None for a file on disk, which ranks read themselves."""
    entry = linecache.cache.get(filename)
    # (size, mtime, lines, full name); a shorter entry is a loader that was never asked.
    if entry is None or len(entry) == 1 or Path(filename).exists():
        return None
    return "".join(entry[2])


def _newest_with(cls: type) -> dict[str, str]:
    for filename in reversed(list(linecache.cache)):
        text = _cached_text(filename)
        if text is not None and _defines(text, cls):
            return {filename: text}
    return {}


def _defines(text: str, cls: type) -> bool:
    return re.search(rf"^[ \t]*class[ \t]+{re.escape(cls.__name__)}\b", text, re.MULTILINE) is not None
