"""Values that are no tensors of the model: copied when they are saved, and read back without running anybody's code.

A file of a rank is one such value, written by ``torch.save`` and read with ``weights_only``. What that could not give
back is refused when it is saved, by its name, and not when it is needed.
"""

from __future__ import annotations

import copy
import io
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

__all__ = ["decode", "encode", "freeze", "thaw"]

_MARK = "__air_nb__"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_SEQUENCES: tuple[type, ...] = (list, tuple, set)
_MAPPINGS: tuple[type, ...] = (dict, OrderedDict, Counter)

TensorSink = Callable[[torch.Tensor, str], str]


def freeze(value: Any, name: str, sink: TensorSink | None = None) -> Any:
    """Copy a value into one that ``encode`` takes.

    Args:
        value: Numbers, text, tensors, numpy arrays, and lists, tuples, sets and dictionaries of them.
        name: What it is called in messages; parts of it are named after it.
        sink: Takes each tensor and its name, and returns a key by which ``thaw`` finds it again; None: tensors are
            copied to the CPU and stay in the value.

    Raises:
        TypeError: A part of it can't be restored without running code from the file.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value, name, sink)
    if isinstance(value, np.ndarray | np.generic):
        return {_MARK: "numpy", "content": _array(value, name), "scalar": isinstance(value, np.generic)}
    if kind in _SEQUENCES:
        return kind(freeze(part, f"{name}[{index}]", sink) for index, part in enumerate(value))
    if kind in _MAPPINGS:
        if _MARK in value:
            msg = f"{name} has a key {_MARK!r}, which this file format uses itself: rename the key"
            raise TypeError(msg)
        pairs = [
            (freeze(key, f"key {key!r} of {name}"), freeze(part, f"{name}.{key}", sink)) for key, part in value.items()
        ]
        return kind(dict(pairs)) if kind is Counter else kind(pairs)
    if kind in torch.serialization.get_safe_globals():
        return copy.deepcopy(value)
    msg = (
        f"{name} is a {kind.__module__}.{kind.__qualname__} ({value!r:.80}): it can't be restored without running code "
        "from the checkpoint. Let state_dict() return numbers, text, tensors, lists and dictionaries, or allow the "
        "class by torch.serialization.add_safe_globals"
    )
    raise TypeError(msg)


def _tensor(value: torch.Tensor, name: str, sink: TensorSink | None) -> Any:
    if sink is not None:
        return {_MARK: "tensor", "key": sink(value, name)}
    if isinstance(value, DTensor):
        msg = f"{name} is a sharded tensor outside a model and its optimizer: put its module itself into `state`"
        raise TypeError(msg)
    return value.detach().to("cpu", copy=True)


def _array(value: Any, name: str) -> bytes:
    content = io.BytesIO()
    try:
        np.save(content, value, allow_pickle=False)
    except ValueError as error:
        msg = f"{name} is a numpy array of Python objects: {error}"
        raise TypeError(msg) from error
    return content.getvalue()


def thaw(value: Any, tensors: Callable[[str], torch.Tensor] | None = None) -> Any:
    """What was frozen.

    Args:
        value: Result of ``freeze``.
        tensors: Finds the tensors that its sink took.
    """
    kind = type(value)
    if kind in _SEQUENCES:
        return kind(thaw(part, tensors) for part in value)
    if kind not in _MAPPINGS:
        return value
    match value.get(_MARK):
        case "tensor":
            assert tensors is not None
            return tensors(value["key"])
        case "numpy":
            array = np.load(io.BytesIO(value["content"]), allow_pickle=False)
            return array[()] if value["scalar"] else array
    pairs = {thaw(key): thaw(part, tensors) for key, part in value.items()}
    return kind(pairs)


def encode(value: Any) -> bytes:
    """A frozen value as a file."""
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def decode(content: bytes) -> Any:
    """Read a file back, running nothing that it says.

    Raises:
        pickle.UnpicklingError: It holds a class that is not allowed in this process.
    """
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
