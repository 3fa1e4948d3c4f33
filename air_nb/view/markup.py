"""Text as HTML, for the few places where ours is more than text: header, footer, log view. Pure."""

from __future__ import annotations

import html
import re
from typing import Any

from air_nb.tracking.links import Link

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


def headline(text: str, link: Link | None = None) -> dict[str, Any]:
    """MIME bundle of one line of ours: its text, and the same with links that can be clicked."""
    plain = text if link is None else f"{text} · {link.label}: {link.text}"
    if link is None or link.href is None:
        linked = _LINK.sub(lambda url: _anchor(url[0], url[0]), as_html(plain))
    else:
        linked = f"{as_html(text)} · {_anchor(html.escape(link.href), as_html(link.label))}"
    return {"text/plain": plain, "text/html": f'<div style="opacity:.75;{TEXT_STYLE}">{linked}</div>'}


def _anchor(href: str, label: str) -> str:
    """Both escaped already."""
    return f'<a href="{href}" target="_blank" rel="noopener">{label}</a>'
