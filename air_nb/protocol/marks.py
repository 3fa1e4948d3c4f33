"""What a pickle of ours names, besides the user's objects: stand-ins that get their meaning where it is thawed.

A pickle can name only importable things. These functions are such names; ``pickling.thaw`` puts objects of the process
that thaws in their place. Holds no state of its own.
"""

from __future__ import annotations

import pickle
import types
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ShippedRegistry", "main_globals_here", "make_code", "make_shipped", "shipped_here"]


class ShippedRegistry:
    """On a rank: which functions and classes came from the kernel, and under which key."""

    def __init__(self) -> None:
        self._objects: dict[str, object] = {}
        self._keys: dict[int, str] = {}

    def make(self, key: str, constructor: Callable[..., object], *args: object) -> object:
        """Construct an object and remember it; the registry keeps it alive, so its id stays its own."""
        made = constructor(*args)
        self._objects[key] = made
        self._keys[id(made)] = key
        return made

    def key_of(self, candidate: object) -> str | None:
        """The key under which the kernel knows this very object."""
        return self._keys.get(id(candidate))

    def table(self) -> Mapping[str, object]:
        """Key to object, for thawing on the rank what is meant for the kernel."""
        return MappingProxyType(self._objects)


def make_shipped(_key: str, _constructor: Callable[..., object], *_: object) -> object:
    """In a pickle: construct a function or class of the kernel and register it under its key."""
    raise _misplaced(make_shipped.__name__)


def shipped_here(_key: str) -> object:
    """In a pickle: the function or class that was shipped under this key."""
    raise _misplaced(shipped_here.__name__)


def main_globals_here() -> dict[str, Any]:
    """In a pickle: the dict that is ``__main__`` for the code of the cell."""
    raise _misplaced(main_globals_here.__name__)


def _misplaced(name: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"{name} has a meaning only inside air_nb.protocol.pickling.thaw")


def make_code(filename: str, /, *args: Any) -> types.CodeType:
    """In a pickle: a code object as cloudpickle describes it, with the file name that it really has."""
    return types.CodeType(*args).replace(co_filename=filename)
