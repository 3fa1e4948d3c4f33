"""Why a GPU runs below its highest clock: NVML's bits as words. Pure."""

from __future__ import annotations

__all__ = ["describe_slowdown", "throttle_words"]

# nvmlClocksEventReasons of nvml.h, called nvmlClocksThrottleReasons before driver 535.
_WORDS = {
    0x1: "idle",
    0x2: "clocks_set",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
    0x100: "display",
}
# The others are everyday: an idle GPU clocks down, a busy one runs at its power limit.
_SLOWDOWNS = {"hw_thermal": "heat", "sw_thermal": "heat", "power_brake": "the power brake"}


def throttle_words(bits: int) -> tuple[str, ...]:
    """The reasons in a bit mask of NVML, unknown ones left out."""
    return tuple(word for bit, word in _WORDS.items() if bits & bit)


def describe_slowdown(reasons: tuple[str, ...] | None) -> str:
    """What is wrong, such as "slowed by heat"; empty if nothing is or it is unknown."""
    causes = dict.fromkeys(_SLOWDOWNS[reason] for reason in reasons or () if reason in _SLOWDOWNS)
    return f"slowed by {' and '.join(causes)}" if causes else ""
