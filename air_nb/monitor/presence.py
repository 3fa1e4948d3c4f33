"""Whether somebody looks at the panel. Pure: what the pages say goes in with the time at which they said it.

A page that is closed, or whose browser sleeps, says nothing any more: silence must not count as looking, else a
forgotten tab would keep a kernel polling (and from being culled) for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Presence", "ViewState"]

_LEAST_SILENCE_S = 30.0  # browsers slow the timers of tabs in the background down to one call a minute
_MOST_VIEWS = 64


class ViewState(StrEnum):
    """What a view of the panel says of itself; any state can follow any other."""

    ACTIVE = "active"
    """It is on the screen and somebody has touched the page within the idle time."""
    HIDDEN = "hidden"
    IDLE = "idle"
    """On the screen, and nobody has touched the page for the idle time."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class _View:
    state: ViewState
    beat_at: float


class Presence:
    """The views of the panel in all pages.

    Not thread-safe by itself: one writer, and readers that may see the state before or after it.

    Args:
        idle_s: Time without input after which a page calls itself idle; a view that says nothing for so long, and 30 s
            at least, counts as gone.
    """

    def __init__(self, idle_s: float = 300.0) -> None:
        self.idle_s = idle_s
        self._views: dict[str, _View] = {}

    def tell(self, view: str, state: ViewState, now: float) -> bool:
        """Take over what a view says; a beat is the same state again.

        Args:
            view: The view's id, unique among all pages.
            state: Its state.
            now: Time of the caller's clock, in seconds.

        Returns:
            Whether it has become active with this: values should be fresh now.
        """
        was_active = self._is_active(self._views.get(view), now)
        self._views.pop(view, None)  # put at the end: the order is that of the last beats
        if state is not ViewState.GONE:
            self._views[view] = _View(state, now)
        while len(self._views) > _MOST_VIEWS:  # pages that went without a word
            del self._views[next(iter(self._views))]
        return state is ViewState.ACTIVE and not was_active

    def wants(self, now: float) -> bool:
        """Whether any view is active."""
        return any(self._is_active(view, now) for view in tuple(self._views.values()))

    def why_not(self, now: float) -> str:
        """Why nobody is looking, for the page's paused badge; empty if somebody is."""
        views = tuple(self._views.values())
        if any(self._is_active(view, now) for view in views):
            return ""
        states = {view.state for view in views if now - view.beat_at < self._silence_s()}
        if ViewState.IDLE in states:
            return f"nobody has touched the page for {self.idle_s:.0f} s"
        return "the panel is out of sight" if ViewState.HIDDEN in states else "no page shows the panel"

    def _is_active(self, view: _View | None, now: float) -> bool:
        return view is not None and view.state is ViewState.ACTIVE and now - view.beat_at < self._silence_s()

    def _silence_s(self) -> float:
        return max(_LEAST_SILENCE_S, self.idle_s)
