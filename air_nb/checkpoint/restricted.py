"""Read torch's ``.metadata``, a pickle, without running what a stranger may have put into it.

The pickle is rebuilt from sealed stand-ins of the few classes that ``.metadata`` is made of; anything else that it
names is refused. ``load_metadata`` makes what torch needs from them by ordinary calls; only it imports torch.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from air_nb.errors import CheckpointDamagedError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["Entry", "Layout", "load_layout", "load_metadata"]

_TORCH_METADATA = "torch.distributed.checkpoint.metadata"
_DTYPE_PREFIXES = ("float", "bfloat", "complex", "int", "uint", "bool", "qint", "quint", "bits")

# What unpickling of damaged bytes has been seen to raise.
_UNPICKLING_ERRORS = (
    *(pickle.UnpicklingError, EOFError, ImportError, AttributeError, LookupError, TypeError, ValueError),
    *(ArithmeticError, MemoryError, RecursionError),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a checkpoint.

    Attributes:
        shape: Of the whole tensor; None for what is no tensor.
        dtype: Torch's name for it (``"bfloat16"``); None for what is no tensor.
        shards: Into how many pieces it is cut.
    """

    shape: tuple[int, ...] | None
    dtype: str | None
    shards: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What ``.metadata`` says, in plain words.

    Attributes:
        entries: By key.
        file_sizes_bytes: The files that hold them, and how many bytes of each are needed.
    """

    entries: Mapping[str, Entry]
    file_sizes_bytes: Mapping[str, int]


class _Sealed(type):
    """A class whose attributes a pickle can't set."""

    def __setattr__(cls, name: str, value: object) -> None:
        msg = f"refused to set {cls.__name__}.{name}"
        raise pickle.UnpicklingError(msg)


class _StandIn(metaclass=_Sealed):
    """Takes any state; what it means is decided afterwards."""


class _Metadata(_StandIn):
    pass


class _Tensor(_StandIn):
    pass


class _Bytes(_StandIn):
    pass


class _Chunk(_StandIn):
    pass


class _StorageMeta(_StandIn):
    pass


class _StorageInfo(_StandIn):
    pass


class _Properties(_StandIn):
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, self.memory_format, self.pin_memory = state


class _Index(_StandIn):
    fqn: str
    offset: Any = None  # torch leaves out what is None
    index: int | None = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)


class _MemoryFormat(_StandIn):
    def __init__(self, value: int) -> None:
        self.value = value


class _Size(tuple[int, ...], metaclass=_Sealed):
    __slots__ = ()


class _TorchName(str, metaclass=_Sealed):
    """``torch.<name>``: a dtype or a layout."""

    __slots__ = ()


def _layout(name: str) -> _TorchName:
    return _TorchName(str(name).removeprefix("torch."))


def _path(*parts: str) -> str:
    """A ``pathlib`` path, as text: it is only ever shown."""
    return "/".join(map(str, parts)).replace("//", "/", 1)


_ALLOWED: Mapping[tuple[str, str], Any] = {
    (_TORCH_METADATA, "Metadata"): _Metadata,
    (_TORCH_METADATA, "MetadataIndex"): _Index,
    (_TORCH_METADATA, "TensorStorageMetadata"): _Tensor,
    (_TORCH_METADATA, "BytesStorageMetadata"): _Bytes,
    (_TORCH_METADATA, "ChunkStorageMetadata"): _Chunk,
    (_TORCH_METADATA, "TensorProperties"): _Properties,
    (_TORCH_METADATA, "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    (_TORCH_METADATA, "StorageMeta"): _StorageMeta,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch", "Size"): _Size,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and name.startswith(_DTYPE_PREFIXES):
            return _TorchName(name)
        msg = f"it names {module}.{name}, which no checkpoint's description needs"
        raise pickle.UnpicklingError(msg)


def _unpickle(content: bytes) -> _Metadata:
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except _UNPICKLING_ERRORS as error:
        raise _unreadable(content, error) from error
    if not isinstance(metadata, _Metadata):
        raise _unreadable(content, TypeError(f"it holds a {type(metadata).__name__}"))
    return metadata


def _unreadable(content: bytes, error: BaseException) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f".metadata ({len(content)} bytes) is not what torch writes: {error}. Its bytes are damaged, or come from "
        "somebody who wants code to run here; if you trust them, torch's own FileSystemReader reads any pickle"
    )


def load_layout(content: bytes) -> Layout:
    """Read ``.metadata`` without torch.

    Raises:
        CheckpointDamagedError: It is not what torch writes.
    """
    metadata = cast("Any", _unpickle(content))
    try:
        sizes: dict[str, int] = {}
        for info in (metadata.storage_data or {}).values():
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
        entries = {key: _entry(stored) for key, stored in metadata.state_dict_metadata.items()}
    except _UNPICKLING_ERRORS as error:
        raise _unreadable(content, error) from error
    return Layout(entries, sizes)


def _entry(stored: Any) -> Entry:
    if isinstance(stored, _Tensor):
        known = cast("Any", stored)
        return Entry(tuple(known.size), str(known.properties.dtype), len(known.chunks))
    return Entry(None, None, 1)


def load_metadata(content: bytes) -> Metadata:
    """Read ``.metadata`` as what torch makes of it. Imports torch.

    Raises:
        CheckpointDamagedError: It is not what torch writes.
    """
    from torch.distributed.checkpoint import metadata as torch_metadata

    stand_in = cast("Any", _unpickle(content))
    try:
        return torch_metadata.Metadata(
            state_dict_metadata={key: _storage(stored) for key, stored in stand_in.state_dict_metadata.items()},
            planner_data=stand_in.planner_data,
            storage_data={_index(key): _info(info) for key, info in (stand_in.storage_data or {}).items()},
            storage_meta=torch_metadata.StorageMeta(**_known(stand_in.storage_meta, torch_metadata.StorageMeta)),
            version=getattr(stand_in, "version", None),
        )
    except _UNPICKLING_ERRORS as error:
        raise _unreadable(content, error) from error


def _known(stand_in: Any, cls: type) -> dict[str, Any]:
    """The attributes of a stand-in that this torch's class has, too."""
    names = cls.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: value for name, value in getattr(stand_in, "__dict__", {}).items() if name in names}


def _storage(stored: Any) -> Any:
    import torch
    from torch.distributed.checkpoint import metadata as torch_metadata

    if isinstance(stored, _Bytes):
        return torch_metadata.BytesStorageMetadata()
    chunks = [
        torch_metadata.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        for chunk in stored.chunks
    ]
    return torch_metadata.TensorStorageMetadata(_properties(stored.properties), torch.Size(stored.size), chunks)


def _properties(properties: Any) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import TensorProperties

    formats = (torch.contiguous_format, torch.channels_last, torch.preserve_format)  # by torch's own numbers
    return TensorProperties(
        dtype=_of_torch(properties.dtype, torch.dtype),
        layout=_of_torch(properties.layout, torch.layout),
        requires_grad=bool(properties.requires_grad),
        memory_format=formats[properties.memory_format.value],
        pin_memory=bool(properties.pin_memory),
    )


def _of_torch(name: str, kind: type) -> Any:
    import torch

    value = getattr(torch, name)
    if not isinstance(value, kind):
        msg = f"torch.{name} is no {kind.__name__}"
        raise TypeError(msg)
    return value


def _index(index: Any) -> Any:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return MetadataIndex(index.fqn, index.offset, index.index)


def _info(info: Any) -> Any:
    # Private, but by this name every .metadata refers to it.
    from torch.distributed.checkpoint.filesystem import _StorageInfo as TorchStorageInfo

    return TorchStorageInfo(**_known(info, TorchStorageInfo))
