"""How the memory of torch tensors crosses a process border: out of band, each storage once.

torch's own pickling of a storage writes it into a byte string, so a large tensor would be copied three times and two
views of one storage would come out as two. Here the storage is a buffer of the pickle (protocol 5): not copied when
pickled, and mapped when unpickled. All of a tensor but its storage is left to torch.

Never imports torch where it is not needed: objects to pickle exist only if torch is loaded, and only the rebuilding of
a tensor imports it. A storage made from a mapped file can't be resized, which nothing but FSDP's own flat storages
does.
"""

from __future__ import annotations

import pickle
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["StorageFreezer", "rebuild_tensor_v3"]


class StorageFreezer:
    """Reduces the storages that one pickler meets.

    Attributes:
        moved_from_gpu: Whether a storage was not in host memory.
    """

    def __init__(self) -> None:
        self.moved_from_gpu = False
        # torch makes a new TypedStorage for each tensor it pickles; what they share is known by the address of its C++
        # object.
        self._seen: dict[int, torch.UntypedStorage] = {}

    def kinds(self) -> tuple[type, ...]:
        """The classes of storages; none if torch is not loaded (or is just being loaded by another thread)."""
        module = vars(sys.modules.get("torch.storage", sys))
        return tuple(module[name] for name in ("TypedStorage", "UntypedStorage") if name in module)

    def reduce(self, storage: Any) -> tuple[Any, ...]:
        """What pickle is told about a storage of one of these classes."""
        if type(storage).__name__ == "TypedStorage":
            return self._reduce_typed(storage)
        return self._reduce_untyped(storage)

    def _reduce_typed(self, storage: torch.TypedStorage) -> tuple[Any, ...]:
        untyped = storage._untyped_storage  # noqa: SLF001 - what torch's own pickling reads
        return _rebuild_typed, (self._seen.setdefault(untyped._cdata, untyped), storage.dtype)  # noqa: SLF001 - likewise

    def _reduce_untyped(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        if storage.device.type == "meta" or storage.nbytes() == 0:
            return _rebuild_empty, (storage.nbytes(), storage.device.type if storage.device.type == "meta" else "cpu")
        if storage.device.type != "cpu":
            self.moved_from_gpu = True
            storage = storage.cpu()  # type: ignore[no-untyped-call]
        return _rebuild_untyped, (pickle.PickleBuffer(_bytes_of(storage)),)


def _bytes_of(storage: torch.UntypedStorage) -> Any:
    """The storage's memory as a numpy array of bytes, not copied."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


def _rebuild_untyped(buffer: memoryview) -> torch.UntypedStorage:
    import torch

    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _rebuild_empty(nbytes: int, device: str) -> torch.UntypedStorage:
    import torch

    return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]


def _rebuild_typed(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def rebuild_tensor_v3(storage: Any, *arguments: Any) -> torch.Tensor:
    """Stands in for ``torch._utils._rebuild_tensor_v3`` (float8 and other new dtypes) where a pickle is loaded.

    torch pickles such a tensor with an untyped storage and rebuilds it from a typed one: its own storage pickle happens
    to turn one into the other, ours does not.
    """
    import torch

    if isinstance(storage, torch.UntypedStorage):
        storage = _rebuild_typed(storage, torch.uint8)
    rebuild: Callable[..., torch.Tensor] = torch._utils._rebuild_tensor_v3  # noqa: SLF001 - what the pickle names
    return rebuild(storage, *arguments)
