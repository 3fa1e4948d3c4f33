"""Python objects across the border between kernel and ranks: freeze, thaw, and what stays a reference.

Kernel to rank: one ``Freezer`` takes the values name by name with one memo, so identity, aliases and cycles over
several names survive. Notebook functions and classes travel by value (cloudpickle); what they call their globals, the
kernel's ``__main__``, becomes the globals of the rank's cell. Each of them is *shipped*: it gets a key, under which the
kernel remembers the original.

Rank to kernel: a shipped function or class goes home as its key, never by value. By value it would come with its
class attributes and globals, and cloudpickle would write these over the ones in the kernel. What a rank defined itself
comes by value, with globals of its own.

Used in the kernel and in ranks; holds no state of its own.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import TYPE_CHECKING, Any

from air_nb.errors import CaptureError, Uncapturable
from air_nb.protocol import marks
from air_nb.protocol.bundle import Bundle
from air_nb.protocol.freezer import NOTHING, Freezer, LimitError, RefusedError, explain
from air_nb.protocol.marks import ShippedRegistry
from air_nb.protocol.tensors import rebuild_tensor_v3

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Freezer", "LimitError", "RefusedError", "ShippedRegistry", "explain", "freeze_values", "thaw"]


def thaw(
    bundle: Bundle,
    *,
    main_globals: dict[str, Any] | None = None,
    shipped: Mapping[str, object] = NOTHING,
    registry: ShippedRegistry | None = None,
    may_import: bool = True,
) -> dict[str, Any]:
    """Rebuild the values of a bundle.

    Unpickling runs code: only for bundles from our own run directory.

    Args:
        bundle: What a ``Freezer`` made. Arrays and tensors live on its buffers.
        main_globals: The globals of the cell. What notebook functions read is written into it. Not needed for results.
        shipped: In the kernel, the originals of what was shipped with this run.
        registry: On a rank, remembers what was shipped.
        may_import: Whether modules that are not loaded here may be imported for it.

    Returns:
        Name to value, in the order of ``Freezer.add``.

    Raises:
        UnpicklingError: A module would have to be imported and may not.
        Exception: Whatever rebuilding an object raises, with a note that names the variable.
    """
    hooks: dict[tuple[str, str], Callable[..., object]] = {
        _key(marks.make_shipped): (registry or ShippedRegistry()).make,
        _key(marks.shipped_here): shipped.__getitem__,
        ("torch._utils", "_rebuild_tensor_v3"): rebuild_tensor_v3,
    }
    if main_globals is None:
        return _load_all(_Thawer(bundle, hooks, may_import=may_import))
    hooks[_key(marks.main_globals_here)] = lambda: main_globals
    # cloudpickle sets it to a dict in the globals of each function; `__builtins__.print` works with the module only.
    builtins_before = main_globals.get("__builtins__")
    try:
        return _load_all(_Thawer(bundle, hooks, may_import=may_import))
    finally:
        if builtins_before is not None:
            main_globals["__builtins__"] = builtins_before


def _key(mark: Callable[..., object]) -> tuple[str, str]:
    return mark.__module__, mark.__name__


def _load_all(thawer: _Thawer) -> dict[str, Any]:
    values: dict[str, Any] = {}
    while not thawer.at_end:
        name = thawer.load()
        try:
            values[name] = thawer.load()
        except Exception as error:
            error.add_note(f"This happened while `{name}` was rebuilt from its pickle in process {os.getpid()}.")
            raise
    return values


def freeze_values(
    values: Mapping[str, Any], *, registry: ShippedRegistry | None = None, hidden: Mapping[str, Any] = NOTHING
) -> Bundle:
    """Freeze the results of a rank.

    Args:
        values: Name to value.
        registry: The one given to ``thaw``: what the kernel has already goes back as a reference.
        hidden: As for ``Freezer``.

    Raises:
        CaptureError: A value can't be pickled; its one problem names it and says why.
    """
    freezer = Freezer(registry=registry, hidden=hidden)
    for name, value in values.items():
        try:
            freezer.add(name, value)
        except Exception as error:
            culprit, refusal = explain(error, freezer.current, value)
            part = "is" if culprit is value else f"holds a {type(culprit).__name__},"
            reason = f"it {part} {refusal.what}"
            raise CaptureError((Uncapturable(name, type(value).__name__, reason, refusal.advice),)) from error
    return freezer.bundle()


class _Thawer(pickle.Unpickler):
    """Gives some of the names in a pickle the meaning that they have in this process."""

    def __init__(
        self, bundle: Bundle, hooks: Mapping[tuple[str, str], Callable[..., object]], *, may_import: bool
    ) -> None:
        self._reader = bundle.reader()
        super().__init__(self._reader, buffers=bundle.buffers)
        self._hooks = hooks
        self._may_import = may_import

    @property
    def at_end(self) -> bool:
        return self._reader.at_end

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in self._hooks:
            return self._hooks[module_name, global_name]
        if not self._may_import and module_name not in sys.modules:
            raise pickle.UnpicklingError(
                f"{module_name}.{global_name} is needed, and {module_name} is not imported here"
            )
        return super().find_class(module_name, global_name)
