"""Lets a rank's own child processes and ``inspect`` work with what was defined in the notebook.

The notebook's functions and classes live in ``__main__``, which a spawned loader worker doesn't have. A rank therefore
sends them to its children by value; in a forked child, whose ``__main__`` is a copy of the rank's, they go by name, so
that what comes back is the rank's own class.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
import types
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import cloudpickle

__all__ = ["install"]


def install() -> None:
    """Teach this process's ``multiprocessing`` and ``inspect`` about the notebook's code; once, in a rank."""
    rank_pid = os.getpid()

    def reducer_override(_pickler: ForkingPickler, obj: Any) -> Any:
        if not isinstance(obj, (types.FunctionType, type)) or getattr(obj, "__module__", None) != "__main__":
            return NotImplemented
        if os.getpid() != rank_pid and _main_attribute(obj.__qualname__) is obj:
            return NotImplemented
        return cloudpickle.loads, (cloudpickle.dumps(obj),)

    ForkingPickler.reducer_override = reducer_override  # type: ignore[method-assign, assignment]  # the C pickler's documented hook
    _teach_inspect()


def _main_attribute(qualified_name: str) -> Any:
    found: Any = sys.modules["__main__"]
    for part in qualified_name.split("."):
        found = getattr(found, part, None)
    return found


def _teach_inspect() -> None:
    """``inspect.getsource`` of a class looks for its module's file, which a notebook has not: look at its cell."""
    plain_getfile = inspect.getfile

    def getfile(obj: Any) -> str:
        if inspect.isclass(obj) and obj.__module__ == "__main__":
            found = _file_of_class(obj)
            if found is not None:
                return found
        return plain_getfile(obj)

    inspect.getfile = getfile  # type: ignore[assignment]  # takes all that the plain one takes


def _file_of_class(cls: type) -> str | None:
    """File of one of its own methods; for a class without methods, the newest cell that defines it."""
    for member in vars(cls).values():
        function = getattr(member, "__func__", member)  # of a classmethod or staticmethod
        code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
        if code is not None and code.co_filename in linecache.cache and code.co_qualname.startswith(cls.__qualname__):
            return str(code.co_filename)
    definition = re.compile(rf"^\s*class\s+{re.escape(cls.__name__)}\b", re.MULTILINE)
    for name in reversed(linecache.cache):
        if not Path(name).exists() and definition.search("".join(linecache.getlines(name))):
            return name
    return None
