"""What the kernel sends to a page: one builder per message, JSON values in and out. Pure.

The names of the fields are the interface to ``static/panel.js``. `seq` is added by the connection. Nothing here is
larger than `LARGEST_BYTES`: the Jupyter server drops what comes faster than about 1 MB a second, and says so in the
cell's output.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from air_nb.monitor.gpu_report import DriverState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from air_nb.monitor.gpu_report import GpuProcess, GpuReport, GpuSample
    from air_nb.monitor.holders import Holder
    from air_nb.monitor.host import HostSample
    from air_nb.monitor.poller import PollerStatus, Snapshot
    from air_nb.sidebar.rows import LogChunk, RootRows, RunRow

__all__ = [
    "LARGEST_BYTES",
    "Facts",
    "Message",
    "checkpoints",
    "devices",
    "hello",
    "history",
    "log",
    "processes",
    "reply",
    "runs",
    "sample",
    "status",
]

Message = dict[str, Any]

LARGEST_BYTES = 1_000_000
_ROWS_BYTES = 600_000  # of one message; escaped twice on its way, text that isn't ASCII grows
_MOST_RUNS = 50
_MOST_CHECKPOINTS = 100
_MOST_PROCESSES = 64
_LONGEST_TEXT = 500


@dataclass(frozen=True, slots=True)
class Facts:
    """Which kernel this is.

    Attributes:
        kernel_id: Jupyter's id of it; empty if it has none.
        pid: Its process.
        host: Name of the machine.
        version: Of air_nb.
    """

    kernel_id: str
    pid: int
    host: str
    version: str


def hello(facts: Facts, *, interval_s: float, idle_s: float, window_s: float, points: int) -> Message:
    """The first message of a connection, and after a resync."""
    times = {"interval_s": interval_s, "idle_s": idle_s, "window_s": window_s, "points": points}
    return {"type": "hello", **asdict(facts), **times}


def devices(report: GpuReport, host: HostSample) -> Message:
    """What there is, as opposed to what it does now."""
    return {
        "type": "devices",
        "driver": {"state": str(report.driver_state), "reason": report.reason, "version": report.driver_version},
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu_key(gpu),
                "name": gpu.name,
                "memory_total_bytes": gpu.memory_total_bytes,
                "power_limit_watts": gpu.power_limit_watts,
                "mig": gpu.mig,
            }
            for gpu in report.gpus
        ],
        "host": {
            "cpu_count": host.cpu_count,
            "memory_total_bytes": host.memory_total_bytes,
            "disk_path": host.disk_path,
            "disk_total_bytes": host.disk_total_bytes,
        },
    }


def gpu_key(gpu: GpuSample) -> str:
    """The UUID. A GPU that was never reached has none, and still has its card in the page."""
    return gpu.uuid or f"index-{gpu.index}"


def sample(snapshot: Snapshot) -> Message:
    """Values of this moment. `stale_s` is the age of the GPUs' if the driver did not answer this time."""
    report, host = snapshot.report, snapshot.host
    is_stale = report.gpus and report.driver_state is not DriverState.OK
    return {
        "type": "sample",
        "at": snapshot.polled_at.timestamp(),
        "gpus": [
            {
                "uuid": gpu_key(gpu),
                "state": str(gpu.state),
                "reason": gpu.reason,
                "utilization_percent": gpu.utilization_percent,
                "memory_used_bytes": gpu.memory_used_bytes,
                "temperature_celsius": gpu.temperature_celsius,
                "power_watts": gpu.power_watts,
            }
            for gpu in report.gpus
        ],
        "host": {
            "cpu_percent": host.cpu_percent,
            "memory_used_bytes": host.memory_used_bytes,
            "disk_used_bytes": host.disk_used_bytes,
        },
        "stale_s": round(report.age_s(snapshot.polled_at), 1) if is_stale else None,
    }


def history(columns: Mapping[str, Any]) -> Message:
    """The ring of the last hours, from `History.as_base64`."""
    fitting = _fitting(columns["gpus"], LARGEST_BYTES - 100_000)
    return {"type": "history", **columns, "gpus": fitting}


def processes(report: GpuReport, holders: Mapping[int, Holder]) -> Message:
    """Who holds memory of which GPU, the largest first."""
    rows = [
        {
            "uuid": gpu_key(gpu),
            "processes": [_process(process, holders.get(process.pid)) for process in gpu.processes[:_MOST_PROCESSES]],
        }
        for gpu in report.gpus
    ]
    return {"type": "processes", "gpus": _fitting(rows, _ROWS_BYTES)}


def _process(process: GpuProcess, holder: Holder | None) -> Message:
    return {
        "pid": process.pid,
        "used_bytes": process.used_bytes,
        "kind": str(holder.kind) if holder else "stranger",
        "label": holder.label if holder else f"pid {process.pid}",
        "run_id": holder.run_id if holder else None,
        "rank": holder.rank if holder else None,
    }


def runs(rows: Sequence[RunRow], problem: str = "") -> Message:
    """The runs, newest first, live ones in any case; `more` were left out.

    Args:
        rows: The runs.
        problem: Why these are old ones; empty if they are not.
    """
    kept = sorted(range(len(rows)), key=lambda number: (not rows[number].is_live, number))[:_MOST_RUNS]
    fitting = _fitting([_cut(asdict(rows[number])) for number in sorted(kept)], _ROWS_BYTES)
    return {"type": "runs", "runs": fitting, "more": len(rows) - len(fitting), "problem": _short(problem)}


def checkpoints(roots: Sequence[RootRows], problem: str = "") -> Message:
    """The checkpoints of each root, newest first; `more` of it were left out.

    Args:
        roots: The roots.
        problem: Why these are old ones; empty if they are not.
    """
    left, shown = _ROWS_BYTES, []
    for root in roots:
        rows = [_cut(asdict(row)) for row in root.checkpoints[:_MOST_CHECKPOINTS]]
        fitting = _fitting(rows, left)
        left -= sum(map(_size, fitting)) + len(root.root) + _LONGEST_TEXT
        more = root.more + len(root.checkpoints) - len(fitting)
        shown.append({"root": root.root, "problem": _short(root.problem), "checkpoints": fitting, "more": more})
        if left <= 0:
            break
    return {"type": "checkpoints", "roots": shown, "problem": _short(problem)}


def status(now: PollerStatus) -> Message:
    """Whether samples are taken now, and why or why not."""
    return {"type": "status", **asdict(now)}


def reply(request: int, *, ok: bool, text: str) -> Message:
    """The answer to a request."""
    return {"type": "reply", "request": request, "ok": ok, "text": text[: 4 * _LONGEST_TEXT]}


def log(chunk: LogChunk) -> Message:
    """A piece of a rank's output."""
    return {"type": "log", **asdict(chunk)}


def _fitting(rows: Sequence[Message], budget: int) -> list[Message]:
    """As many from the beginning as the budget has room for."""
    fitting: list[Message] = []
    for row in rows:
        budget -= _size(row)
        if budget < 0:
            break
        fitting.append(row)
    return fitting


def _size(row: Message) -> int:
    return len(json.dumps(row))


def _cut(row: Message) -> Message:
    """Long texts shortened, but for what the page sends back."""
    kept = {"path", "run_id"}
    return {
        name: _short(value) if isinstance(value, str) and name not in kept else value for name, value in row.items()
    }


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
