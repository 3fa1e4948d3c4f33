"""Prints measurements as they come, one JSON line each, and the table of a benchmark when it has ended."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.measure import Measurement, table

__all__ = ["Report", "Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asked for.

    Attributes:
        repeats: Interleaved rounds.
        quick: Only see whether it works: one round, small sizes.
        scaling: ``launch`` measures 1 to 32 ranks, too.
    """

    repeats: int = 5
    quick: bool = False
    scaling: bool = False

    @property
    def rounds(self) -> range:
        """Numbers of the rounds."""
        return range(1 if self.quick else self.repeats)


@dataclass
class Report:
    """Measurements of one benchmark."""

    benchmark: str
    baselines: Sequence[str] = ("torchrun",)
    measurements: list[Measurement] = field(default_factory=list)

    def add(
        self,
        case: str,
        what: str,
        tool: str,
        value: float | str | None,
        unit: str = "",
        *,
        repeat: int = 0,
        limit: float | None = None,
    ) -> None:
        """Keep a measurement, and print it."""
        rounded = round(value, 5) if isinstance(value, float) else value
        measurement = Measurement(self.benchmark, case, what, tool, rounded, unit, repeat, limit)
        self.measurements.append(measurement)
        print(json.dumps(asdict(measurement) | {"load_1min": round(os.getloadavg()[0], 2)}), flush=True)

    def table(self) -> str:
        """The table in markdown."""
        return table(self.measurements, self.baselines)
