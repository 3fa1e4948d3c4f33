"""Definitions of a notebook that neither pickle nor cloudpickle sends by value, taken apart and put together again.

pickle sends a cached function, a ``NewType`` and the like by name, and looks the name up in the rank's ``__main__``,
which has no such thing. Others hold a lock or weak references that are theirs to make anew. Pure; knows no pickler.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from air_nb.protocol.refusals import Refusal

__all__ = ["COMPILED", "REDUCERS", "reduce_function"]

COMPILED = Refusal("a compiled function", "Call torch.compile(...) inside the cell, which compiles it there anyway.")

_Reduced = tuple[Any, ...]


def reduce_function(function: types.FunctionType) -> _Reduced | None:
    """How to rebuild a function that a decorator of the library made; None for any other."""
    registry = function.__dict__.get("registry")
    if "dispatch" in function.__dict__ and isinstance(registry, types.MappingProxyType):
        return _make_singledispatch, (registry[object], dict(registry))
    if "_torchdynamo_orig_callable" in function.__dict__:
        return _reduce_compiled(function)
    return None


def _reduce_compiled(function: types.FunctionType) -> _Reduced | None:
    """``torch.compile(f)``: torch's own context, which pickles, is called with ``f`` again.

    Backend, mode and options come through; torch leaves ``dynamic`` and ``fullgraph`` behind, as with compiled modules.
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    context = cells["self"].cell_contents if "self" in cells else None
    if type(context).__name__ not in {"OptimizeContext", "DisableContext"}:
        return None
    return operator.call, (context, function.__dict__["_torchdynamo_orig_callable"])


def _make_singledispatch(default: Callable[..., Any], registry: Mapping[Any, Callable[..., Any]]) -> Callable[..., Any]:
    made = functools.singledispatch(default)
    for kind, implementation in registry.items():
        made.register(kind, implementation)
    return made


def _reduce_cached(cached: Any) -> Any:
    if _is_importable(cached):
        return NotImplemented
    return _make_cached, (cached.__wrapped__, cached.cache_parameters())


def _make_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(cached: functools.cached_property[Any]) -> _Reduced:
    # It holds a lock up to Python 3.11.
    return functools.cached_property, (cached.func,), {"attrname": cached.attrname}


def _reduce_new_type(made: Any) -> Any:
    return NotImplemented if _is_importable(made) else (typing.NewType, (made.__name__, made.__supertype__))


def _reduce_type_parameter(made: Any) -> Any:
    return NotImplemented if _is_importable(made) else (type(made), (made.__name__,))


def _reduce_type_alias(made: Any) -> Any:
    if _is_importable(made):
        return NotImplemented
    return _make_type_alias, (made.__name__, made.__value__, made.__type_params__)


def _make_type_alias(name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    return vars(typing)["TypeAliasType"](name, value, type_params=parameters)


def _reduce_environ(environ: Any) -> Any:
    # Each process has its own; a copy of this one would write into the rank's all the same.
    return (getattr, (os, "environ")) if environ is os.environ else NotImplemented


def _is_importable(definition: Any) -> bool:
    """Whether a rank finds this very object under its name in a module."""
    module = sys.modules.get(definition.__module__)
    if module is None or module.__name__ == "__main__":
        return False
    found: Any = module
    for part in getattr(definition, "__qualname__", definition.__name__).split("."):
        found = getattr(found, part, None)
    return found is definition


# By exact class. NotImplemented leaves an object to pickle, which then sends its name.
REDUCERS: dict[type, Callable[[Any], Any]] = {
    type(functools.lru_cache(len)): _reduce_cached,
    functools.cached_property: _reduce_cached_property,
    type(os.environ): _reduce_environ,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_type_parameter,
    typing.TypeVarTuple: _reduce_type_parameter,
}
if sys.version_info >= (3, 12):
    REDUCERS[typing.TypeAliasType] = _reduce_type_alias
