"""What a front end holds after a cell's messages: the outputs that a saved notebook would have."""

from __future__ import annotations

import copy
import textwrap
from typing import Any

from tests.support.kernel import Cell

__all__ = ["body", "body_lines", "headlines", "on_ranks", "screen"]


def on_ranks(source: str, options: str = "--nproc 4") -> str:
    """A ``%%distributed`` cell."""
    return f"%%distributed {options}\n{textwrap.dedent(source).strip()}\n"


def screen(cell: Cell) -> list[dict[str, Any]]:
    """Outputs from top to bottom, with updates and clears carried out and stream text joined, as a front end does it.

    Each has ``kind`` (``stdout``, ``stderr``, ``display`` or ``error``), ``text``, ``data`` and ``id`` (display id).
    """
    shown: list[dict[str, Any]] = []
    clear_next = False
    for _, message in cell.messages:
        content, kind = message["content"], message["msg_type"]
        if kind == "clear_output":
            clear_next = content["wait"]
            shown = shown if clear_next else []
        elif kind == "update_display_data":
            for output in shown:
                if output["id"] == content["transient"]["display_id"]:
                    output["data"] = content["data"]
                    output["text"] = content["data"].get("text/plain", "")
        elif kind in {"stream", "display_data", "execute_result", "error"}:
            if clear_next:
                shown, clear_next = [], False
            _append(shown, _output(kind, content))
    return shown


def _output(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    if kind == "stream":
        return {"kind": content["name"], "text": content["text"], "data": {}, "id": None}
    if kind == "error":
        return {"kind": "error", "text": "\n".join(content["traceback"]), "data": {}, "id": None}
    display_id = content.get("transient", {}).get("display_id")
    data = copy.deepcopy(content["data"])
    return {"kind": "display", "text": data.get("text/plain", ""), "data": data, "id": display_id}


def _append(shown: list[dict[str, Any]], output: dict[str, Any]) -> None:
    if shown and output["kind"] in {"stdout", "stderr"} and shown[-1]["kind"] == output["kind"]:
        shown[-1]["text"] += output["text"]
    else:
        shown.append(output)


def headlines(cell: Cell) -> list[str]:
    """Text of our own lines around the output: header, then footer."""
    return [output["text"] for output in screen(cell) if _is_headline(output)]


def body(cell: Cell) -> list[dict[str, Any]]:
    """The screen without our own lines around it."""
    return [output for output in screen(cell) if not _is_headline(output)]


def body_lines(cell: Cell) -> list[str]:
    """Lines of the body; a display with more than text is one line: ``<image/png>``."""
    lines: list[str] = []
    for output in body(cell):
        rich = sorted(set(output["data"]) - {"text/plain"})
        lines += [f"<{','.join(rich)}>"] if rich else output["text"].removesuffix("\n").split("\n")
    return lines


def _is_headline(output: dict[str, Any]) -> bool:
    return str(output["id"]).endswith(("-header", "-footer"))
