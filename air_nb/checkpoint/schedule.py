"""When a checkpoint is due: by steps, by time, or as often as failures make it worth its cost. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

__all__ = ["Every", "Pace", "Schedule", "optimal_interval_s"]

_UNITS_S = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_TIME = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS_S)})")

_FIRST_AUTO_S = 60.0
"""``every="auto"`` must measure one save before it can choose."""

_MAX_SHARE = 0.01  # of the time that ranks may spend on agreeing
_MAX_STRIDE = 64  # steps that nobody asks in, however short they are


@dataclass(frozen=True, slots=True)
class Every:
    """How often to save. With neither steps nor seconds nor ``auto``, only when told to.

    Attributes:
        steps: At each multiple of it.
        seconds: That long after the last one.
        auto: By ``optimal_interval_s``.
    """

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False

    @classmethod
    def parse(cls, value: int | str | None) -> Every:
        """Read ``500`` (steps), ``"10min"`` (also s, m, h, d), ``"auto"`` or None.

        Raises:
            ValueError: It is none of these, or not positive.
            TypeError: It is neither a whole number nor text.
        """
        if value is None:
            return cls()
        if isinstance(value, bool) or not isinstance(value, int | str):
            msg = f"every={value!r} is a {type(value).__name__}: give steps (500), a time ('10min'), 'auto' or None"
            raise TypeError(msg)
        if value == "auto":
            return cls(auto=True)
        match = _TIME.fullmatch(value.strip()) if isinstance(value, str) else None
        seconds = float(match[1]) * _UNITS_S[match[2]] if match else None
        amount = value if isinstance(value, int) else seconds
        if amount is None or amount <= 0:
            msg = f"every={value!r}: give a positive number of steps (500), a time ('10min', '90s', '2h'), or 'auto'"
            raise ValueError(msg)
        return cls(steps=value) if isinstance(value, int) else cls(seconds=seconds)


class Schedule:
    """Remembers when was saved, and tells when is next. Clocks are the caller's.

    Args:
        every: How often.
        mtbf_s: Mean time between failures of the whole job, for ``auto``.
        now_s: Reading of a monotonic clock.
    """

    def __init__(self, every: Every, *, mtbf_s: float, now_s: float) -> None:
        if not mtbf_s > 0:
            msg = f"mtbf_s={mtbf_s!r}: the mean time between failures of the job, in seconds"
            raise ValueError(msg)
        self._every = every
        self._mtbf_s = mtbf_s
        self._last_at_s = now_s
        self._interval_s = _FIRST_AUTO_S if every.auto else every.seconds

    @property
    def interval_s(self) -> float | None:
        """Time between two saves; None if time does not count."""
        return self._interval_s

    @property
    def is_regular(self) -> bool:
        """Whether it ever says that a save is due."""
        return self._every != Every()

    def due_by_step(self, step: int) -> bool:
        """Whether the number of steps says so: the same answer on every rank."""
        return self._every.steps is not None and step % self._every.steps == 0

    def due_by_time(self, now_s: float) -> bool:
        """Whether the clock says so: ranks may differ, so one of them decides."""
        return self._interval_s is not None and now_s - self._last_at_s >= self._interval_s

    def began(self, now_s: float) -> None:
        """A save has begun."""
        self._last_at_s = now_s

    def measured(self, *, stall_s: float, seconds: float) -> None:
        """A save has ended.

        Args:
            stall_s: For how long training stood still.
            seconds: How long it took until the checkpoint was committed.
        """
        if self._every.auto:
            # Not more often than one can end: there is only one in flight.
            self._interval_s = max(optimal_interval_s(stall_s, self._mtbf_s), seconds)


def optimal_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The time between checkpoints at which saving and doing lost work again cost least together.

    Daly's higher-order estimate (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", 2006, eq. 37), which is Young's sqrt(2 x cost x mtbf) for small costs.

    Args:
        cost_s: For how long one save stops training.
        mtbf_s: Mean time between failures of the job.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


class Pace:
    """At which steps the ranks ask each other whether to stop: at each one, unless steps are so short that it shows.

    All ranks give the same numbers, and so get the same answers.
    """

    def __init__(self, step: int = 0) -> None:
        self._next = step + 1

    def is_due(self, step: int) -> bool:
        """Whether to ask after so many steps."""
        return step >= self._next

    def asked(self, step: int, *, step_us: int, ask_us: int) -> None:
        """Choose the next time.

        Args:
            step: The step at which was asked.
            step_us: How long a step takes on the slowest rank.
            ask_us: How long asking takes if all are there at once.
        """
        stride = math.ceil(ask_us / (_MAX_SHARE * max(step_us, 1)))
        self._next = step + min(max(stride, 1), _MAX_STRIDE)
