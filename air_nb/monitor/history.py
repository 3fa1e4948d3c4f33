"""The last two hours of all GPUs and of the machine, in memory that does not grow.

NaN stands for unknown here and in the page: a line that has gaps, where 0 would be an idle GPU.
"""

from __future__ import annotations

import base64
import math
import sys
import threading
from array import array
from typing import TYPE_CHECKING, Any

from air_nb.monitor.gpu_report import DriverState, GpuReport, GpuSample, GpuState

if TYPE_CHECKING:
    from air_nb.monitor.host import HostSample

__all__ = ["History"]

_NAN = math.nan
_GPU_COLUMNS = ("utilization_percent", "memory_percent", "temperature_celsius", "power_watts")
_HOST_COLUMNS = ("cpu_percent", "memory_percent")
_MOST_GPUS = 64  # those that came and went included: a machine whose GPUs change their names must not fill memory


class History:
    """A ring of rows, one per poll. Thread-safe.

    Args:
        points: The most rows that it holds.
        window_s: Rows older than that, counted from the newest, leave.
    """

    def __init__(self, points: int = 720, window_s: float = 7200.0) -> None:
        self.points = points
        self.window_s = window_s
        self._lock = threading.Lock()
        self._count = 0  # rows ever added; row n is at n % points
        self._first = 0  # the oldest row that counts
        self._at = array("d", [_NAN]) * points
        self._host = _Columns(points, _HOST_COLUMNS)
        self._gpus: dict[str, _Columns] = {}
        self._sampled_at = -math.inf  # the newest driver sample in here

    def __len__(self) -> int:
        with self._lock:
            return self._count - self._first

    def add(self, report: GpuReport, host: HostSample) -> None:
        """Add a row at the time of the host's sample.

        A report that repeats a sample (the driver did not answer) leaves a gap instead of drawing it twice.
        """
        with self._lock:
            self._make_room(host.at.timestamp())
            place = self._count % self.points
            self._count += 1
            self._first = max(self._first, self._count - self.points)
            self._at[place] = host.at.timestamp()
            self._host.put(place, self._count, _host_values(host))
            for columns in self._gpus.values():
                columns.clear(place)
            for gpu in self._fresh(report):
                if gpu.uuid is not None:
                    self._columns(gpu.uuid).put(place, self._count, _gpu_values(gpu))
            self._forget()

    def as_base64(self, since: float = -math.inf) -> dict[str, Any]:
        """The rows in the shape of the page's `history` message, without its `type` and `seq`.

        Args:
            since: Only rows later than that, in seconds since the epoch.

        Returns:
            `at` (float64), and `gpus` and `host` with float32 columns, all little-endian, in base64, oldest row first.
        """
        with self._lock:
            rows = [row % self.points for row in range(self._first, self._count)]
            rows = [place for place in rows if self._at[place] > since]
            return {
                "at": _encode(array("d", [self._at[place] for place in rows])),
                "gpus": [{"uuid": uuid, **columns.encode(rows)} for uuid, columns in self._gpus.items()],
                "host": self._host.encode(rows),
            }

    def _make_room(self, at: float) -> None:
        """Times rise from row to row; after the machine's clock was set back the rows of its future leave."""
        while self._count > self._first and self._newest() >= at:
            self._count -= 1
        spacing_s = 0.75 * self.window_s / self.points
        # Polled more often than the ring is meant for, it would hold minutes only: the newest row then gives its place.
        if self._count - self._first > 1 and self._newest() - self._newest(1) < spacing_s:
            self._count -= 1
        while self._count > self._first and self._at[self._first % self.points] <= at - self.window_s:
            self._first += 1

    def _newest(self, back: int = 0) -> float:
        return self._at[(self._count - 1 - back) % self.points]

    def _fresh(self, report: GpuReport) -> tuple[GpuSample, ...]:
        at = report.at.timestamp()
        if report.driver_state is not DriverState.OK or at == self._sampled_at:
            return ()
        self._sampled_at = at
        return report.gpus

    def _columns(self, uuid: str) -> _Columns:
        if uuid not in self._gpus:
            if len(self._gpus) == _MOST_GPUS:
                del self._gpus[min(self._gpus, key=lambda each: self._gpus[each].last_row)]
            self._gpus[uuid] = _Columns(self.points, _GPU_COLUMNS)
        return self._gpus[uuid]

    def _forget(self) -> None:
        """GPUs of which no row is left."""
        for uuid in [uuid for uuid, columns in self._gpus.items() if columns.last_row <= self._first]:
            del self._gpus[uuid]


class _Columns:
    """The values of one GPU, or of the machine."""

    def __init__(self, points: int, names: tuple[str, ...]) -> None:
        self._values = {name: array("f", [_NAN]) * points for name in names}
        self.last_row = 0  # the number of rows when it was seen last

    def put(self, place: int, row: int, values: dict[str, float]) -> None:
        self.last_row = row
        for name, column in self._values.items():
            column[place] = values[name]

    def clear(self, place: int) -> None:
        for column in self._values.values():
            column[place] = _NAN

    def encode(self, rows: list[int]) -> dict[str, str]:
        return {name: _encode(array("f", [column[row] for row in rows])) for name, column in self._values.items()}


def _gpu_values(gpu: GpuSample) -> dict[str, float]:
    if gpu.state is not GpuState.OK:
        return dict.fromkeys(_GPU_COLUMNS, _NAN)
    return {
        "utilization_percent": _known(gpu.utilization_percent),
        "memory_percent": _part(gpu.memory_used_bytes, gpu.memory_total_bytes),
        "temperature_celsius": _known(gpu.temperature_celsius),
        "power_watts": _known(gpu.power_watts),
    }


def _host_values(host: HostSample) -> dict[str, float]:
    memory = _part(host.memory_used_bytes, host.memory_total_bytes)
    return {"cpu_percent": _known(host.cpu_percent), "memory_percent": memory}


def _known(value: float | None) -> float:
    return _NAN if value is None else float(value)


def _part(used: int | None, total: int | None) -> float:
    return _NAN if used is None or not total else 100 * used / total


def _encode(column: array[float]) -> str:
    if sys.byteorder == "big":
        column.byteswap()
    return base64.b64encode(column.tobytes()).decode("ascii")
