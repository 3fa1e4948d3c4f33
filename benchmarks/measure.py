"""Measurements, and the table that sums them up (pure)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Measurement", "format_value", "median", "percentile", "table"]

OURS = "air_nb"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One value, measured once.

    Attributes:
        benchmark: Name of the benchmark.
        case: Under which conditions.
        what: What was measured.
        tool: Of whom.
        value: A number in ``unit``; a word (``"ok"``); None if it did not happen within ``limit``.
        unit: ``"s"``, ``"ms"``, ``"MB"``, ``"steps/s"``, ``""``.
        repeat: Which round of the interleaved rounds, from 0.
        limit: How long was waited, in ``unit``.
    """

    benchmark: str
    case: str
    what: str
    tool: str
    value: float | str | None
    unit: str = ""
    repeat: int = 0
    limit: float | None = None


def median(values: Sequence[float | None]) -> float | None:
    """The median, where None (did not happen in time) is longer than any time; None if it is such a one."""
    if not values:
        return None
    found = statistics.median(math.inf if value is None else value for value in values)
    return None if math.isinf(found) else found


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of the values do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def format_value(value: float) -> str:
    """Three significant digits, whole numbers above a hundred: ``0.138``, ``13.8``, ``1384``."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def table(measurements: Iterable[Measurement], baselines: Sequence[str] = ("torchrun",)) -> str:
    """A markdown table: a row per case and thing measured, a column per tool, medians with their range.

    Args:
        measurements: Of one benchmark.
        baselines: Tools that air_nb is compared with, a column of ratios (air_nb / baseline) for each.
    """
    rows: dict[tuple[str, str, str], dict[str, list[Measurement]]] = {}
    tools: list[str] = []
    for measurement in measurements:
        key = (measurement.case, measurement.what, measurement.unit)
        rows.setdefault(key, {}).setdefault(measurement.tool, []).append(measurement)
        if measurement.tool not in tools:
            tools.append(measurement.tool)
    compared = [tool for tool in baselines if tool in tools and OURS in tools]
    lines = [_row(["case", "what", *tools, *(f"{OURS} / {tool}" for tool in compared)])]
    lines.append(_row(["---"] * (2 + len(tools) + len(compared))))
    for (case, what, unit), found in rows.items():
        cells = [_cell(found.get(tool, [])) for tool in tools]
        ratios = [_ratio(found.get(OURS, []), found.get(tool, [])) for tool in compared]
        lines.append(_row([case, f"{what}, {unit}" if unit else what, *cells, *ratios]))
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(measurements: Sequence[Measurement]) -> str:
    """``0.14 (0.12-0.19)``; ``never in 20`` if at least half did not happen; words as they are, each once."""
    words = [m.value for m in measurements if isinstance(m.value, str)]
    if words or not measurements:
        return ", ".join(dict.fromkeys(words)) or "-"
    values = [m.value for m in measurements if not isinstance(m.value, str)]
    middle = median(values)
    limits = [m.limit for m in measurements if m.limit is not None]
    never = f"never in {format_value(max(limits))}" if limits else "never"
    if middle is None:
        return never
    if len(values) == 1:
        return format_value(middle)
    happened = [value for value in values if value is not None]
    worst = never if len(happened) < len(values) else format_value(max(happened))
    return f"{format_value(middle)} ({format_value(min(happened))}-{worst})"


def _ratio(ours: Sequence[Measurement], theirs: Sequence[Measurement]) -> str:
    mine, other = (
        median([m.value for m in measurements if not isinstance(m.value, str)]) for measurements in (ours, theirs)
    )
    if mine is None or other is None or mine <= 0 or other <= 0:  # a difference of two noisy times may be negative
        return "-"
    return format_value(mine / other)
