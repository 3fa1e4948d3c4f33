"""A page with the panel and nothing else: the kernel is a script, and what the panel sends to it is written down."""

from __future__ import annotations

import base64
import math
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import air_nb

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

__all__ = ["AT", "STATIC", "PanelPage", "checkpoint", "devices", "gpu_sample", "history", "run_row", "sample"]

STATIC = Path(air_nb.__file__).parent / "sidebar" / "static"
AT = time.time()
"""The kernel's time when the page is greeted."""

GIB = 2**30
HELLO = {
    "type": "hello",
    "kernel_id": "k1",
    "pid": 4242,
    "host": "box",
    "version": "0.1.0",
    "interval_s": 10,
    "idle_s": 300,
    "window_s": 7200,
    "points": 720,
}
_HOST = {"cpu_count": 16, "memory_total_bytes": 128 * GIB, "disk_path": "/home/alice", "disk_total_bytes": 1000 * GIB}
# Loopback: the page may use the clipboard. Nothing listens there: all that is asked for is answered in `_serve`.
_ORIGIN = "http://127.0.0.1:9"
_PAGE = """<!doctype html><html><head><meta charset="utf-8"><title>panel</title><link rel="stylesheet" href="panel.css">
<style>html, body {{ margin: 0 }} #root {{ min-height: 100vh }}</style></head><body {body}><div id="root"></div>
<script type="module">
import * as panel from './panel.js';
let seq = 0;
const listeners = new Set();
const tell = message => {{ for (const each of [...listeners]) each(message); }};
window.sent = [];
window.fake = {{
  emit: messages => messages.forEach(message => {{
    if (message.type === 'hello') seq = 0;
    tell({{ ...message, seq: seq++ }});
  }}),
  lose: count => {{ seq += count; }},
  tell,
}};
const model = {{
  send: message => window.sent.push(message),
  onMessage: callback => {{ listeners.add(callback); return () => listeners.delete(callback); }},
}};
window.panel = panel;
window.listeners = listeners;
window.unmount = panel.mount(model, document.getElementById('root'));
</script></body></html>"""


# The module may have been imported long before the test: the page's time begins with the kernel's.
_CLOCK = """(() => {
  const Real = Date, late_ms = Real.now() - %d;
  window.Date = class extends Real {
    constructor(...given) { given.length ? super(...given) : super(Real.now() - late_ms); }
    static now() { return Real.now() - late_ms; }
  };
})();"""


class PanelPage:
    """See the module.

    Args:
        page: An empty page.
        theme: ``light`` or ``dark``, as JupyterLab says it; None: a page that is no JupyterLab.
    """

    def __init__(self, page: Page, *, theme: str | None = "light") -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        is_light = {"light": "true", "dark": "false"}
        self._html = _PAGE.format(body=f'data-jp-theme-light="{is_light[theme]}"' if theme else "")
        page.add_init_script(_CLOCK % (AT * 1000))
        page.route("**/*", self._serve)
        page.goto(f"{_ORIGIN}/page.html")
        page.wait_for_function("() => window.unmount")

    def _serve(self, route: Route) -> None:
        name = route.request.url.rsplit("/", 1)[-1]
        kinds = {"panel.js": "text/javascript", "panel.css": "text/css"}
        if name == "page.html":
            route.fulfill(body=self._html, content_type="text/html")
        elif name in kinds:
            route.fulfill(body=(STATIC / name).read_text(), content_type=kinds[name])
        else:
            route.fulfill(status=204)

    def emit(self, *messages: dict[str, Any]) -> None:
        """Messages of the kernel, numbered; drawn when this returns."""
        self.page.evaluate("messages => window.fake.emit(messages)", list(messages))
        self.draw()

    def draw(self) -> None:
        """Until the page has drawn what it knows."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def greet(self, count: int = 0, *, points: int = 0, **sampled: Any) -> None:
        """All that a kernel says to a new connection."""
        begin = [{**HELLO}, devices(count)]
        past = [history(count, points)] if points else []
        self.emit(*begin, *past, sample(count, **sampled), status("polling"))

    def sent(self, kind: str) -> list[dict[str, Any]]:
        """What the panel has sent of a type."""
        return [message for message in self.page.evaluate("() => window.sent") if message["type"] == kind]

    def reply(self, kind: str, text: str, *, ok: bool = True) -> None:
        """Answer the last request of a type."""
        self.emit({"type": "reply", "request": self.sent(kind)[-1]["request"], "ok": ok, "text": text})

    def states(self) -> list[str]:
        """What was said of the view, in order, without repetitions."""
        said = [message["state"] for message in self.sent("presence")]
        return [state for index, state in enumerate(said) if index == 0 or said[index - 1] != state]

    def wait_for_state(self, state: str) -> None:
        """Until that is the last that was said of the view."""
        self.page.wait_for_function(
            "state => window.sent.filter(each => each.type === 'presence').at(-1)?.state === state", arg=state
        )

    def ink(self, chart: Locator) -> int:
        """Number of pixels of a chart that are not empty."""
        return int(
            chart.evaluate(
                "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data"
                ".filter((value, index) => index % 4 === 3 && value > 0).length"
            )
        )

    def columns_of_ink(self, chart: Locator, *, above: int = 3) -> list[bool]:
        """For each column of a chart's pixels, whether a line is in it: not the frame at the edges."""
        columns = chart.evaluate(
            """(canvas, margin) => {
              const {width, height} = canvas;
              const data = canvas.getContext('2d').getImageData(0, 0, width, height).data;
              const rows = Array.from({length: height - 2 * margin}, (_, index) => index + margin);
              return Array.from({length: width}, (_, x) => rows.some(y => data[4 * (y * width + x) + 3] > 0));
            }""",
            above,
        )
        return [bool(each) for each in columns]


def devices(count: int, *, state: str = "ok", reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """So many GPUs; none: as on a machine without a driver."""
    if not count and state == "ok":
        state, reason = "no_library", reason or "libnvidia-ml.so.1 was not found"
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory_total_bytes": 80 * GIB, "power_limit_watts": 700.0, "mig": False}
    gpus = [{"index": index, "uuid": f"GPU-{index}", **gpu, **fields} for index in range(count)]
    return {
        "type": "devices",
        "driver": {"state": state, "reason": reason, "version": "570.86.15" if count else None},
        "gpus": gpus,
        "host": _HOST,
    }


def gpu_sample(index: int, **fields: Any) -> dict[str, Any]:
    """One GPU of a sample."""
    values = {
        "utilization_percent": (37 * index + 11) % 101,
        "memory_used_bytes": (7 * index + 12) % 80 * GIB,
        "temperature_celsius": 40 + 5 * index % 40,
        "power_watts": 100.0 + 61 * index % 500,
    }
    return {"uuid": f"GPU-{index}", "state": "ok", "reason": None, **values, **fields}


def sample(
    count: int, *, at: float = AT, changes: dict[int, dict[str, Any]] | None = None, **fields: Any
) -> dict[str, Any]:
    """Values of so many GPUs.

    Args:
        count: Number of GPUs.
        at: Time of it.
        changes: Values other than the usual ones, by index.
        fields: The same for all GPUs.
    """
    host = {"cpu_percent": 23.0, "memory_used_bytes": 41 * GIB, "disk_used_bytes": 412 * GIB}
    changed = changes or {}
    gpus = [gpu_sample(index, **fields, **changed.get(index, {})) for index in range(count)]
    return {"type": "sample", "at": at, "gpus": gpus, "host": host, "stale_s": None}


def history(count: int, points: int, *, step_s: float = 10.0, gap: range = range(0)) -> dict[str, Any]:
    """The time before `AT`, with unknown values in a gap."""

    def pack(values: Sequence[float], kind: str) -> str:
        return base64.b64encode(struct.pack(f"<{len(values)}{kind}", *values)).decode()

    def wave(base: float, height: float, phase: float) -> str:
        values = [base + height * math.sin(phase + index / 25) for index in range(points)]
        return pack([math.nan if index in gap else value for index, value in enumerate(values)], "f")

    at = pack([AT - step_s * (points - index) for index in range(points)], "d")
    gpus = [
        {
            "uuid": f"GPU-{index}",
            "utilization_percent": wave(60, 38, index),
            "memory_percent": wave(50, 20, 2 * index),
            "temperature_celsius": wave(60, 12, 3 * index),
            "power_watts": wave(400, 250, index),
        }
        for index in range(count)
    ]
    return {
        "type": "history",
        "at": at,
        "gpus": gpus,
        "host": {"cpu_percent": wave(30, 20, 0), "memory_percent": wave(40, 5, 1)},
    }


def status(state: str, *, interval_s: float = 10, why: str = "") -> dict[str, Any]:
    """Whether the kernel polls."""
    return {"type": "status", "status": state, "interval_s": interval_s, "why": why}


def run_row(run_id: str, **fields: Any) -> dict[str, Any]:
    """A live run of this notebook."""
    usual = {
        "name": run_id,
        "state": "RUNNING",
        "is_live": True,
        "is_mine": True,
        "notebook": "train.ipynb",
        "nproc": 2,
        "device": "cuda",
        "created_at": AT - 65,
        "started_at": AT - 60,
        "ended_at": None,
        "reason": "",
        "line": "step 120  loss 2.31",
        "figures": "",
        "link": None,
        "can_resume": True,
    }
    return {"run_id": run_id, **usual, **fields}


def checkpoint(step: int, **fields: Any) -> dict[str, Any]:
    """A committed checkpoint."""
    usual = {
        "path": f"/data/ckpt/step-{step}",
        "created_at": AT - 3600,
        "size_bytes": 5 * GIB,
        "state": "committed",
        "verified": None,
        "verifying": False,
        "problem": "",
        "run_id": "r1",
        "run_name": "calm-otter-41",
    }
    return {"step": step, **usual, "can_resume": True, **fields}
