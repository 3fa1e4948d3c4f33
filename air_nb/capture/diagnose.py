"""Where in a value the part is that can't travel, in the words of the notebook: ``cfg["log"]``, "uses `log`".

Pure; follows what pickle would follow, as far as that can be seen from outside.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["describe", "format_bytes"]

# An error message is worth a few milliseconds, and nobody reads a path of ten steps.
_VISITED = 20_000
_PER_CONTAINER = 1_000
_MIB = 1 << 20
_GIB = 1 << 30


def format_bytes(nbytes: int) -> str:
    """``"1.0 GiB"``, ``"256 MiB"``; small sizes as plain bytes."""
    if nbytes >= _GIB:
        return f"{nbytes / _GIB:.1f} GiB"
    return f"{nbytes / _MIB:.0f} MiB" if nbytes >= _MIB else f"{nbytes} bytes"


def describe(name: str, value: object, culprit: object, what: str) -> str:
    """Say what about a value can't travel.

    Args:
        name: The variable.
        value: Its value.
        culprit: The object that can't be pickled, ``value`` itself or something in it.
        what: What the culprit is, with its article.

    Returns:
        "it is an open file", "it uses `log` (TextIOWrapper), an open file", "it holds `cfg["log"]` (TextIOWrapper), an
        open file".
    """
    if culprit is value:
        return f"it is {what}"
    found = _find(name, value, culprit)
    if found is None:
        return f"it holds a {type(culprit).__name__}, {what}"
    return f"it {found.text()} ({type(culprit).__name__}), {what}"


@dataclass(frozen=True, slots=True)
class _Place:
    """How an object was reached: from a name by attributes and items, and from there by what a function uses."""

    path: str
    verb: str = ""
    before: str = ""

    def step(self, part: str) -> _Place:
        return replace(self, path=self.path + part, verb=self.verb or "holds")

    def uses(self, name: str) -> _Place:
        return _Place(name, verb="uses", before=f"{self.text()}, which " if self.verb else "")

    def text(self) -> str:
        return f"{self.before}{self.verb} `{self.path}`"


def _find(name: str, value: object, culprit: object) -> _Place | None:
    """Breadth first, so the shortest way is told."""
    queue = deque([(value, _Place(name))])
    # Keeps what it has seen: a temporary's id could be given to another object.
    seen: dict[int, object] = {id(value): value}
    while queue and len(seen) < _VISITED:
        owner, place = queue.popleft()
        for child, child_place in _children(owner, place):
            if child is culprit:
                return child_place
            if id(child) not in seen:
                seen[id(child)] = child
                queue.append((child, child_place))
    return None


def _children(owner: object, place: _Place) -> Iterator[tuple[object, _Place]]:
    match owner:
        case dict():
            yield from ((item, place.step(f"[{_quote(key)}]")) for key, item in islice(owner.items(), _PER_CONTAINER))
        case list() | tuple():
            yield from ((item, place.step(f"[{index}]")) for index, item in enumerate(owner[:_PER_CONTAINER]))
        case set() | frozenset():
            yield from ((item, place.step("{...}")) for item in islice(owner, _PER_CONTAINER))
        case types.FunctionType():
            yield from ((used, place.uses(name)) for name, used in _used_by(owner))
        case types.MethodType():
            yield owner.__self__, place.step(".__self__")
            yield owner.__func__, place
        case staticmethod() | classmethod():
            yield owner.__func__, place
        case property():
            yield from ((part, place) for part in (owner.fget, owner.fset, owner.fdel))
        case functools.partial():
            yield owner.func, place.step(".func")
            yield owner.args, place.step(".args")
            yield owner.keywords, place.step(".keywords")
        case type():
            yield from _of_class(owner, place)
        case _:
            yield from _of_instance(owner, place)


def _used_by(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Globals, closure variables and defaults of a function."""
    code = function.__code__
    for name in _global_names(code):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False)
    yield from (function.__kwdefaults__ or {}).items()


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _of_class(cls: type, place: _Place) -> Iterator[tuple[object, _Place]]:
    if _travels_by_value(cls):
        yield from ((member, place.step(f".{name}")) for name, member in vars(cls).items())
        yield from ((base, place.uses(base.__name__)) for base in cls.__bases__)


def _of_instance(instance: object, place: _Place) -> Iterator[tuple[object, _Place]]:
    attributes = getattr(instance, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((item, place.step(f".{name}")) for name, item in islice(attributes.items(), _PER_CONTAINER))
    for cls in type(instance).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType) and cls.__module__ != "builtins":
                yield getattr(instance, name, None), place.step(f".{name}")
    if _travels_by_value(type(instance)):
        yield type(instance), place.uses(type(instance).__name__)


def _travels_by_value(cls: type) -> bool:
    return cls.__module__ == "__main__" or "<locals>" in cls.__qualname__


def _quote(key: object) -> str:
    return f'"{key}"' if isinstance(key, str) else repr(key)
