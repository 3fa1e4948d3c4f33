"""Text as HTML, for the few places where ours is more than text: header, footer, log view. Pure."""

from __future__ import annotations

import html
import re
from typing import Any

__all__ = ["as_html", "headline"]

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
_LINK = re.compile(r"https?://[^\s<>\"'&]+(?:&amp;[^\s<>\"'&]+)*")


def as_html(text: str) -> str:
    """Escaped, without colours."""
    return html.escape(_ESCAPES.sub("", text), quote=False)


def headline(text: str) -> dict[str, Any]:
    """MIME bundle of one line of ours: its text, and the same with links that can be clicked."""
    linked = _LINK.sub(lambda link: f'<a href="{link[0]}" target="_blank">{link[0]}</a>', as_html(text))
    # In line with the text of the ranks, and of its size: JupyterLab sets both by these variables.
    style = "opacity:.75;padding-left:var(--jp-code-padding,5px);font-size:var(--jp-code-font-size,13px)"
    return {"text/plain": text, "text/html": f'<div style="{style}">{linked}</div>'}
