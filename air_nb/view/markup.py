"""Text as HTML, for the few places where ours is more than text: header, footer, log view. Pure."""

from __future__ import annotations

import html
import re
from typing import Any

__all__ = ["TEXT_STYLE", "as_html", "headline"]

TEXT_STYLE = (
    "margin:0;padding:2px 0 2px 1ch;"
    "font:var(--jp-code-font-size,13px)/var(--jp-code-line-height,1.3) var(--jp-code-font-family,monospace)"
)
"""As the text of the ranks: JupyterLab sets its size and font by these variables and indents it by one character."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
_LINK = re.compile(r"https?://[^\s<>\"'&]+(?:&amp;[^\s<>\"'&]+)*")


def as_html(text: str) -> str:
    """Escaped, without colours."""
    return html.escape(_ESCAPES.sub("", text), quote=False)


def headline(text: str) -> dict[str, Any]:
    """MIME bundle of one line of ours: its text, and the same with links that can be clicked."""
    linked = _LINK.sub(lambda link: f'<a href="{link[0]}" target="_blank">{link[0]}</a>', as_html(text))
    return {"text/plain": text, "text/html": f'<div style="opacity:.75;{TEXT_STYLE}">{linked}</div>'}
