"""The pickler: what travels by value, what as a reference, what not at all; see ``pickling`` for the whole picture.

Leans on three details of cloudpickle (``globals_ref``, its reduce tuples, its code reducer), which
``tests/unit/protocol/test_cloudpickle_canary.py`` watches.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import cloudpickle

from air_nb.protocol.bundle import Bundle
from air_nb.protocol.by_value import COMPILED, REDUCERS, reduce_function
from air_nb.protocol.marks import ShippedRegistry, main_globals_here, make_code, make_shipped, shipped_here
from air_nb.protocol.refusals import OTHER, TOO_DEEP, Refusal, refusal_for
from air_nb.protocol.tensors import StorageFreezer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["NOTHING", "Freezer", "LimitError", "RefusedError", "explain"]

NOTHING: Mapping[str, Any] = MappingProxyType({})


class RefusedError(pickle.PicklingError):
    """An object that must not travel, whatever pickle thinks of it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.what)
        self.refusal = refusal


class LimitError(pickle.PicklingError):
    """What has been frozen is larger than allowed; nothing was copied to find out."""

    def __init__(self, nbytes: int, limit_bytes: int) -> None:
        super().__init__(f"{nbytes} bytes are more than the limit of {limit_bytes}")
        self.nbytes = nbytes


class Freezer(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles values into one bundle, one call of ``add`` per name.

    After a failure the memo refers to half-written objects: use a new one.

    Args:
        limit_bytes: Raise ``LimitError`` as soon as there is more; None for no limit.
        main_globals: The dict (``ip.user_ns``) that becomes the rank's own; None if functions keep globals of their
            own.
        hidden: Names that IPython put into ``main_globals``, with its objects: functions that read them don't take them
            along.
        registry: On a rank, what goes back to the kernel as a reference.

    Attributes:
        shipped: Key to original, of all functions and classes that travel by value.
        filenames: Of all code that travels.
        current: The object pickled last; after an error, the one to blame.
    """

    def __init__(
        self,
        *,
        limit_bytes: int | None = None,
        main_globals: dict[str, Any] | None = None,
        hidden: Mapping[str, Any] = NOTHING,
        registry: ShippedRegistry | None = None,
    ) -> None:
        self._sink = _Sink(limit_bytes)
        super().__init__(self._sink, protocol=5, buffer_callback=self._sink.take)
        self.shipped: dict[str, object] = {}
        self.filenames: set[str] = set()
        self.current: object = None
        self._storages = StorageFreezer()
        self._handlers: dict[type, Callable[[Freezer, Any], Any]] = {
            types.CodeType: Freezer._reduce_code,
            _MainGlobals: Freezer._reduce_main_globals,
            **dict.fromkeys(REDUCERS, Freezer._reduce_by_value),
        }
        # Unbound methods: the freezer is in no reference cycle, so that what its memo holds is freed with it.
        self._handlers |= dict.fromkeys(self._storages.kinds(), Freezer._reduce_storage)
        self._main_globals = main_globals
        self._hidden = hidden
        self._registry = registry
        # Keys of two captures never meet: a rank may hold functions of an earlier one.
        self._token = os.urandom(6).hex()
        if main_globals is not None:
            # cloudpickle rebuilds functions on globals_ref[id(f.__globals__)]; ours is resolved to the rank's own dict.
            self.globals_ref[id(main_globals)] = _MAIN

    @property
    def moved_from_gpu(self) -> bool:
        """Whether a tensor came through host memory."""
        return self._storages.moved_from_gpu

    @property
    def nbytes(self) -> int:
        """What has been frozen so far, stream and buffers."""
        return self._sink.nbytes

    def add(self, name: str, value: object) -> int:
        """Freeze one more name; returns the bytes it took (a shared object counts for the first of its names).

        Raises:
            LimitError: There is more than ``limit_bytes`` now.
            Exception: Whatever the objects' own pickling raises; ``current`` is the culprit.
        """
        before = self.nbytes
        if isinstance(value, str):
            self._sink.check(len(value))  # pickle would copy a text of gigabytes before it asked
        self.dump(name)
        self.dump(value)
        return self.nbytes - before

    def bundle(self) -> Bundle:
        """All that was added, not copied: buffers are the memory of the live objects."""
        return Bundle(tuple(self._sink.chunks), tuple(self._sink.buffers))

    def reducer_override(self, obj: object) -> Any:
        """How to reduce anything but plain numbers, texts and containers (pickle's own hook)."""
        self.current = obj
        kind = type(obj)
        handler = self._handlers.get(kind)
        if handler is None:
            handler = self._handlers[kind] = self._handler_for(kind)
        return handler(self, obj)

    @staticmethod
    def _handler_for(kind: type) -> Callable[[Freezer, Any], Any]:
        """Called once per class of object and freezer."""
        if issubclass(kind, type) or kind is types.FunctionType:
            return Freezer._reduce_definition
        if issubclass(kind, types.ModuleType):
            return Freezer._reduce_module
        if refusal_for(kind) is None:
            return Freezer._leave_to_pickle
        return Freezer._reduce_stream if issubclass(kind, io.IOBase) else Freezer._refuse

    def _reduce_definition(self, definition: Any) -> Any:
        """A function or a class: by reference, by value, or as the key under which the kernel knows it."""
        if self._registry is not None and (key := self._registry.key_of(definition)) is not None:
            return shipped_here, (key,)
        if isinstance(definition, types.FunctionType) and (rebuilt := self._reduce_decorated(definition)) is not None:
            return rebuilt
        reduced = super().reducer_override(definition)
        if reduced is NotImplemented:
            _check_importable(sys.modules.get(definition.__module__))
        if not isinstance(reduced, tuple) or len(reduced) < _BY_VALUE_PARTS:
            return reduced
        constructor, args, state, *rest = reduced
        if isinstance(definition, types.FunctionType) and definition.__globals__ is self._main_globals:
            self._drop_hidden(state[1]["__globals__"])
        key = f"{self._token}:{len(self.shipped)}"
        self.shipped[key] = definition
        return make_shipped, (key, constructor, *args), state, *rest

    def _reduce_decorated(self, function: types.FunctionType) -> Any:
        reduced = reduce_function(function)
        if reduced is None and "_torchdynamo_orig_callable" in function.__dict__:
            raise RefusedError(COMPILED)
        return reduced

    def _drop_hidden(self, captured_globals: dict[str, Any]) -> None:
        for name in [name for name, value in captured_globals.items() if name in self._hidden]:
            if captured_globals[name] is self._hidden[name]:
                del captured_globals[name]

    def _reduce_code(self, code: types.CodeType) -> Any:
        # cloudpickle calls every file "<dynamic-code>": tracebacks and inspect.getsource would find no line of the
        # notebook.
        self.filenames.add(code.co_filename)
        _, args = self.dispatch_table[types.CodeType](code)
        return make_code, (code.co_filename, *args)

    def _reduce_by_value(self, definition: object) -> Any:
        return REDUCERS[type(definition)](definition)

    def _reduce_storage(self, storage: object) -> Any:
        return self._storages.reduce(storage)

    def _reduce_main_globals(self, _: object) -> Any:
        return main_globals_here, ()

    def _reduce_module(self, module: types.ModuleType) -> Any:
        if sys.modules.get(module.__name__) is module:
            _check_importable(module)
        return NotImplemented

    def _reduce_stream(self, stream: object) -> Any:
        if stream is sys.stdout or stream is sys.__stdout__:
            return getattr, (sys, "stdout")
        if stream is sys.stderr or stream is sys.__stderr__:
            return getattr, (sys, "stderr")
        return self._refuse(stream)

    def _refuse(self, refused: object) -> Any:
        raise RefusedError(refusal_for(type(refused)) or OTHER)

    def _leave_to_pickle(self, _: object) -> Any:
        return NotImplemented


# (constructor, args, state, None, None, state setter): what cloudpickle returns for things that travel by value.
_BY_VALUE_PARTS = 6


def _check_importable(module: types.ModuleType | None) -> None:
    """Refuse what a rank would look for in a module that exists in this process only."""
    name = module.__name__.partition(".")[0] if module is not None else "__main__"
    # What stands in for a module (some packages replace theirs) may have no __spec__; it was imported all the same.
    if name in {"__main__", "__mp_main__"} or getattr(sys.modules.get(name), "__spec__", True) is not None:
        return
    what = f"in the module `{name}`, which was made in this process and can't be imported elsewhere"
    raise RefusedError(Refusal(what, "Put it into a file beside the notebook, or define it in the notebook itself."))


class _MainGlobals(dict[str, Any]):
    """The class of ``_MAIN``: a plain dict would be pickled as its contents."""


# Stands for the kernel's __main__ dict. Not empty, else cloudpickle would fill it in.
_MAIN = _MainGlobals(__name__="__main__")


class _Sink:
    """Where a freezer writes: keeps references to what it is given and counts."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.chunks: list[bytes | memoryview] = []
        self.buffers: list[memoryview] = []
        self.nbytes = 0
        self._limit_bytes = limit_bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Called by pickle for each frame, and with the object itself for long bytes."""
        self._count(len(data))
        self.chunks.append(data if isinstance(data, bytes) else memoryview(data))

    def take(self, buffer: pickle.PickleBuffer) -> None:
        """Called by pickle for each out-of-band buffer (a false return value keeps it out of the stream)."""
        memory = buffer.raw()
        self._count(memory.nbytes)
        self.buffers.append(memory)

    def check(self, nbytes: int) -> None:
        """Refuse so many more bytes, if they are too many."""
        if self._limit_bytes is not None and self.nbytes + nbytes > self._limit_bytes:
            raise LimitError(self.nbytes + nbytes, self._limit_bytes)

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.check(0)


def explain(error: Exception, current: object, value: object) -> tuple[object, Refusal]:
    """Which object is to blame for a failure of ``Freezer.add``, and why.

    Args:
        error: What was raised.
        current: ``Freezer.current``.
        value: What was to be frozen.
    """
    if isinstance(error, RefusedError):
        return current, error.refusal
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return value, TOO_DEEP
    return current, refusal_for(type(current)) or Refusal(f"{OTHER.what} ({error})", OTHER.advice)
