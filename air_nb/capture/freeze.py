"""Names of the notebook, frozen for the ranks: all of them, or one error that lists every name that can't travel.

Runs in the kernel, on the thread that runs the cell, before any process is started. Nothing is copied here: the bundle
refers to the live objects until it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from air_nb.capture.diagnose import describe, format_bytes
from air_nb.capture.sources import collect_sources
from air_nb.errors import CaptureError, Uncapturable
from air_nb.protocol.pickling import Freezer, LimitError, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from air_nb.protocol.bundle import Bundle

__all__ = ["CapturedNamespace", "capture"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_LARGEST_SHOWN = 5


@dataclass(frozen=True, slots=True, eq=False)
class CapturedNamespace:
    """What a cell takes along.

    Attributes:
        names: In the order in which they are rebuilt.
        sizes: Bytes by name; what several names share counts for the first.
        moved_from_gpu: Whether a tensor left GPU memory for the journey.
        sources: File name to text, of code that travels and is on no disk: the cells that define it.
        shipped: Key to original, for ``thaw`` of the results.
        bundle: The pickle; holds references to the live objects, so write it before the user's code goes on.
    """

    names: tuple[str, ...]
    sizes: Mapping[str, int]
    moved_from_gpu: bool
    sources: Mapping[str, str]
    shipped: Mapping[str, object]
    bundle: Bundle


def capture(
    names: Sequence[str],
    namespace: Mapping[str, Any],
    *,
    main_globals: dict[str, Any],
    limit_bytes: int,
    hidden: Mapping[str, Any] = _NOTHING,
) -> CapturedNamespace:
    """Freeze names of the notebook.

    Args:
        names: What to take; each exists in ``namespace``.
        namespace: Where the values are, in a notebook ``main_globals`` itself.
        main_globals: The globals of notebook functions (``ip.user_ns``); becomes the rank's own.
        limit_bytes: For all names together.
        hidden: IPython's own names in ``main_globals`` with their objects (``ip.user_ns_hidden``); functions leave them
            behind.

    Raises:
        CaptureError: Names can't travel, or all together are too large; lists all of them.
    """

    def new_freezer() -> Freezer:
        return Freezer(limit_bytes=limit_bytes, main_globals=main_globals, hidden=hidden)

    freezer = new_freezer()
    sizes: dict[str, int] = {}
    for name in names:
        try:
            sizes[name] = freezer.add(name, namespace[name])
        except Exception as error:  # noqa: BLE001 - pickling runs the objects' own code; all it raises is reported
            values = {name: namespace[name] for name in names}
            problems = _diagnose(values, new_freezer, limit_bytes)
            raise CaptureError(problems or (_problem(name, values[name], error, freezer.current),)) from None
    return CapturedNamespace(
        names=tuple(names),
        sizes=MappingProxyType(sizes),
        moved_from_gpu=freezer.moved_from_gpu,
        sources=MappingProxyType(collect_sources(freezer.filenames, freezer.shipped.values())),
        shipped=MappingProxyType(freezer.shipped),
        bundle=freezer.bundle(),
    )


def _diagnose(
    values: Mapping[str, Any], new_freezer: Callable[[], Freezer], limit_bytes: int
) -> tuple[Uncapturable, ...]:
    """Try each name on its own, as the first failure left the shared memo half-written."""
    problems: list[Uncapturable] = []
    sizes: dict[str, int] = {}
    for name, value in values.items():
        freezer = new_freezer()
        try:
            sizes[name] = freezer.add(name, value)
        except LimitError as error:
            sizes[name] = error.nbytes
        except Exception as error:  # noqa: BLE001 - pickling runs the objects' own code; all it raises is reported
            problems.append(_problem(name, value, error, freezer.current))
    if not _fit_together({name: values[name] for name in sizes}, new_freezer()):
        problems += [_too_large(name, values[name], sizes[name], limit_bytes) for name in _largest(sizes, limit_bytes)]
    return tuple(problems)


def _fit_together(values: Mapping[str, Any], freezer: Freezer) -> bool:
    """Whether the names are within the limit; what they share counts once, so single sizes don't tell."""
    try:
        for name, value in values.items():
            freezer.add(name, value)
    except LimitError:
        return False
    return True


def _largest(sizes: Mapping[str, int], limit_bytes: int) -> list[str]:
    """The names without which the rest would fit, largest first, but at least one and not more than can be read."""
    ordered = sorted(sizes, key=lambda name: -sizes[name])
    left = sum(sizes.values())
    for count, name in enumerate(ordered[:_LARGEST_SHOWN], start=1):
        left -= sizes[name]
        if left <= limit_bytes:
            return ordered[:count]
    return ordered[:_LARGEST_SHOWN]


def _too_large(name: str, value: object, size_bytes: int, limit_bytes: int) -> Uncapturable:
    size = ("over " if size_bytes < 2 * limit_bytes else "") + format_bytes(size_bytes)
    reason = f"it is {size} large, and all names together may have {format_bytes(limit_bytes)}"
    return Uncapturable(name, type(value).__name__, reason, "Load the data inside the cell.")


def _problem(name: str, value: object, error: Exception, current: object) -> Uncapturable:
    culprit, refusal = explain(error, current, value)
    return Uncapturable(name, type(value).__name__, describe(name, value, culprit, refusal.what), refusal.advice)
