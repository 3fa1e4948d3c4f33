"""Copies of tensors in the memory of the host, which training can't change any more.

An asynchronous save stops the training for the copy alone, so this is made for speed. Measured, 303 MB: the copy itself
takes 30 ms. The kernel takes 200 ms to give out the memory when it is first used, so that can be done ahead, in a
thread. Torch's ``copy_`` in several threads waits for all of them at each tensor: 200 ms where the cores are busy.

Used by the thread that saves; the thread ``air_nb-host-memory`` ends before any copy begins.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

__all__ = ["HostCopy", "local_part"]

_log = logging.getLogger(__name__)

_ALIGNMENT = 64
_CHUNK_BYTES = 2**22  # one thread's work at a time: what another one waits for at the end
_PAGE_BYTES = mmap.PAGESIZE
_MOST_THREADS = 4  # more don't make memory faster
# Python has no name for it. A child that is forked (a loader worker) sees zeros; without it, the next copy would get
# each page anew, because the child shares the old one.
_WIPE_ON_FORK = 18


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank has, sharing its memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


@dataclass(frozen=True, slots=True)
class _Form:
    """What a buffer must be like."""

    shape: torch.Size
    dtype: torch.dtype
    pinned: bool

    @classmethod
    def of(cls, local: torch.Tensor) -> _Form:
        # Pinned memory makes the copy from a GPU as fast as the bus is.
        return cls(local.shape, local.dtype, local.is_cuda)

    @property
    def size_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class HostCopy:
    """Copies on the CPU, in memory that is used again by the next save."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[_Form, torch.Tensor]] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def prepare(self, live: Mapping[str, torch.Tensor]) -> None:
        """Get the memory for copies of these, in a thread: the first copy is then as fast as the others.

        What was copied before stays as it is. Not for tensors on a GPU: their memory must be pinned, which another
        thread may not do while a CUDA graph is captured.
        """
        self._settle()
        forms = {name: form for name, one in live.items() if not (form := _Form.of(local_part(one))).pinned}
        self._thread = threading.Thread(target=self._touch_missing, args=(forms,), name="air_nb-host-memory")
        self._thread.start()

    def copy(self, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy this rank's parts; those of the copy before are overwritten."""
        self._settle()
        locals_ = {name: local_part(tensor) for name, tensor in live.items()}
        forms = {name: _Form.of(local) for name, local in locals_.items()}
        self._buffers = {name: one for name, one in self._buffers.items() if name in forms}
        self._add_missing(forms)
        buffers = {name: self._buffers[name][1] for name in live}
        with torch.no_grad():
            _copy([(buffers[name], local) for name, local in locals_.items()])
        return buffers

    def close(self) -> None:
        """Let go of the memory; it is freed once nobody uses the copies any more."""
        self._settle()
        self._buffers = {}

    def _settle(self) -> None:
        """Stop the thread: it looks up after each chunk."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self._stop.clear()

    def _touch_missing(self, forms: Mapping[str, _Form]) -> None:
        try:
            pages = self._add_missing(forms)
            if pages is not None:
                self._touch(pages)
        except OSError as error:  # the thread's border: the copy will try again, and say so
            _log.info("no memory for a copy of the training, yet: %s", error)

    def _touch(self, pages: mmap.mmap) -> None:
        """Use each page once. Huge ones are faster, but only where nobody waits: finding them has taken 1.6 s."""
        _advise(pages, mmap.MADV_HUGEPAGE)
        content = np.frombuffer(pages, dtype=np.uint8)
        for start in range(0, len(content), _CHUNK_BYTES):
            if self._stop.is_set():
                _advise(pages, mmap.MADV_NOHUGEPAGE)
                return
            content[start : start + _CHUNK_BYTES : _PAGE_BYTES] = 0

    def _add_missing(self, forms: Mapping[str, _Form]) -> mmap.mmap | None:
        """Make the buffers that are not there or have another form; returns the memory of those that are not pinned."""
        missing = {name: form for name, form in forms.items() if self._form(name) != form}
        for name in missing:  # first, to have no more memory than it takes
            self._buffers.pop(name, None)
        starts: dict[str, int] = {}
        end = 0
        for name, form in missing.items():
            if form.pinned or not form.size_bytes:
                new = torch.empty(form.shape, dtype=form.dtype, device="cpu", pin_memory=form.pinned)
                self._buffers[name] = form, new
            else:
                starts[name] = end
                end += -(-form.size_bytes // _ALIGNMENT) * _ALIGNMENT
        if not starts:
            return None
        pages = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _advise(pages, _WIPE_ON_FORK)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        for name, start in starts.items():
            form = missing[name]
            content = memory[start : start + form.size_bytes]
            self._buffers[name] = form, content.view(form.dtype).view(form.shape)
        return pages

    def _form(self, name: str) -> _Form | None:
        return self._buffers[name][0] if name in self._buffers else None


def _advise(pages: mmap.mmap, advice: int) -> None:
    with contextlib.suppress(OSError):  # a kernel that was built without it
        pages.madvise(advice)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy all sources to their targets: ``(target, source)``."""
    plain: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in pairs:
        if _is_plain(source):
            plain.append((target, source))
        else:
            target.copy_(source, non_blocking=True)
    _copy_bytes(plain, _n_threads())
    for device in {source.device for _, source in pairs if source.is_cuda}:
        torch.cuda.synchronize(device)


def _n_threads() -> int:
    """This rank's share of the cores: it computes nothing meanwhile, so torch's number of threads does not count."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(len(os.sched_getaffinity(0)) // ranks, _MOST_THREADS))


def _is_plain(source: torch.Tensor) -> bool:
    """Whether its bytes are those of its copy."""
    return (
        type(source) is torch.Tensor
        and source.device.type == "cpu"
        and source.layout == torch.strided
        and source.is_contiguous()
        and not (source.is_conj() or source.is_neg() or source.is_quantized)
    )


def _copy_bytes(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], n_threads: int) -> None:
    """Copy in threads that take what is next, and don't wait for each other before the end."""
    chunks = _chunks(pairs)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                chunk = next(chunks, None)
            if chunk is None:
                return
            np.copyto(*chunk)

    if n_threads == 1 or sum(source.nbytes for _, source in pairs) <= _CHUNK_BYTES:
        work()
        return
    with ThreadPoolExecutor(n_threads - 1, thread_name_prefix="air_nb-host-copy") as pool:
        others = [pool.submit(work) for _ in range(n_threads - 1)]
        work()
    for other in others:
        other.result()


def _chunks(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[Any, Any]]:
    for target, source in pairs:
        to, from_ = (one.reshape(-1).view(torch.uint8).numpy() for one in (target, source))
        for start in range(0, len(from_), _CHUNK_BYTES):
            yield to[start : start + _CHUNK_BYTES], from_[start : start + _CHUNK_BYTES]
