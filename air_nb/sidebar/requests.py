"""What a page may ask for: from a JSON object that anybody who reaches the kernel could have sent, to a checked value.

Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from air_nb.monitor.presence import ViewState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "Log",
    "Present",
    "Refresh",
    "Request",
    "Resume",
    "Resync",
    "SetInterval",
    "Stop",
    "Verify",
    "parse_request",
    "request_number",
]

_INTERVAL_S = (1.0, 600.0)
_LONGEST_ID = 200
_LONGEST_PATH = 8192
_LARGEST = 2**53  # what JavaScript can count to
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Present:
    """A view is on the screen, or no longer, or nobody touches the page."""

    view: str
    state: ViewState


@dataclass(frozen=True, slots=True)
class Refresh:
    """Sample now."""


@dataclass(frozen=True, slots=True)
class SetInterval:
    """Sample so often."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Resync:
    """A message was lost: say everything again."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop a run."""

    run_id: str


@dataclass(frozen=True, slots=True)
class Log:
    """A piece of a rank's output from this byte on; -1: the end."""

    run_id: str
    rank: int
    offset: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Launch a run again from a checkpoint."""

    run_id: str
    path: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Check every byte of a checkpoint."""

    path: str


Request = Present | Refresh | SetInterval | Resync | Stop | Log | Resume | Verify


def parse_request(data: object) -> Request:
    """Check a message of a page.

    Raises:
        ValueError: It is none of those that there are; says what is wrong.
    """
    if not isinstance(data, dict):
        raise ValueError(f"a message is an object, not {type(data).__name__}")  # noqa: TRY004 - what a page sends has no types
    kind = data.get("type")
    parse = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parse is None:
        raise ValueError(f"there is no message of the type {str(kind)[:40]!r}")
    return parse(data)


def request_number(data: object) -> int | None:
    """The number that the reply repeats, if the page wants one."""
    number = data.get("request") if isinstance(data, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) and abs(number) < _LARGEST else None


def _present(data: Mapping[str, Any]) -> Present:
    state = _text(data, "state", _LONGEST_ID)
    if state not in {each.value for each in ViewState}:
        raise ValueError(f"there is no state {state[:40]!r} of a view")
    return Present(_text(data, "view", _LONGEST_ID), ViewState(state))


def _interval(data: Mapping[str, Any]) -> SetInterval:
    seconds = data.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise ValueError("the interval is a number of seconds")
    low, high = _INTERVAL_S
    if not low <= seconds <= high:
        raise ValueError(f"the interval is {low:g} to {high:g} seconds, not {seconds:g}")
    return SetInterval(float(seconds))


def _text(data: Mapping[str, Any], name: str, longest: int) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not value or len(value) > longest or "\0" in value:
        raise ValueError(f"{name} is missing, or no text that can be one")
    return value


def _integer(data: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is missing, or no number from {low} to {high}")
    return value


def _run_id(data: Mapping[str, Any]) -> str:
    return _text(data, "run_id", _LONGEST_ID)


def _path(data: Mapping[str, Any]) -> str:
    return _text(data, "path", _LONGEST_PATH)


_PARSERS: dict[str, Callable[[Mapping[str, Any]], Request]] = {
    "presence": _present,
    "refresh": lambda _: Refresh(),
    "interval": _interval,
    "resync": lambda _: Resync(),
    "stop": lambda data: Stop(_run_id(data)),
    "log": lambda data: Log(
        _run_id(data), _integer(data, "rank", 0, _MOST_RANKS), _integer(data, "offset", -1, _LARGEST)
    ),
    "resume": lambda data: Resume(_run_id(data), _path(data)),
    "verify": lambda data: Verify(_path(data)),
}
