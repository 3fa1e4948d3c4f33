"""What a save and a restore cost, compared with torch's own and with copying the same bytes."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.fresh import Taken, in_fresh_process
from benchmarks.measure import OURS
from benchmarks.report import Report, Settings
from tests.support.ranks import forkserver_with_torch, run_ranks

if TYPE_CHECKING:
    from air_nb.checkpoint import CheckpointManager

__all__ = ["run"]

_RANKS = 2
_LAYERS, _FEW_LAYERS = 8, 2
_TIMES = 3  # within a round: the disk of a busy machine varies more than what is compared
_LIMIT_S = 900.0

_DCP = "torch's dcp"
_TORCH = "torch.save"
_COPY = "copy and fsync"
_BACK_END = "dcp with our back end"
_MEMORY = "copy in memory"

_STALL = "stall of an asynchronous save"
_FIRST_STALL = "stall of the first asynchronous save, in steps()"
_UNPREPARED_STALL = "stall of the first asynchronous save, by hand"
_STEP_S = 0.3  # of a training's, while the memory for copies is made ready


def run(settings: Settings) -> Report:
    """Measure one process, and two ranks with DistributedDataParallel."""
    report = Report("checkpoint", baselines=(_DCP, _TORCH, _COPY))
    layers, times = (_FEW_LAYERS, 1) if settings.quick else (_LAYERS, _TIMES)
    with forkserver_with_torch():
        for repeat in settings.rounds:
            for n_ranks in (1, _RANKS):
                with tempfile.TemporaryDirectory(prefix="air_nb_bench_") as directory:
                    arguments = (Path(directory), layers, times, repeat % 2 == 1)
                    if n_ranks == 1:
                        by_rank = [in_fresh_process(_measure, *arguments)]
                    else:
                        by_rank = run_ranks(n_ranks, _measure, *arguments, timeout_s=_LIMIT_S)
                _add(report, n_ranks, by_rank, repeat)
    return report


def _add(report: Report, n_ranks: int, by_rank: Sequence[tuple[float, list[Taken]]], repeat: int) -> None:
    """Add what the slowest rank measured."""
    size_mb = by_rank[0][0]
    case = f"{'one process' if n_ranks == 1 else f'{n_ranks} ranks, DDP'}, {size_mb:.0f} MB of model and Adam"
    found: dict[tuple[str, str, str], float] = {}
    for _, taken in by_rank:
        for one in taken:
            key = (one.what, one.tool, one.unit)
            found[key] = max(found.get(key, one.value), one.value)
    for (what, tool, unit), value in found.items():
        report.add(case, what, tool, value, unit, repeat=repeat)
    whole = found["synchronous save, on disk", OURS, "s"]
    report.add(case, "throughput of that save", OURS, size_mb / whole, "MB/s", repeat=repeat)
    report.add(
        case,
        "throughput of that save",
        _COPY,
        size_mb / found["synchronous save, on disk", _COPY, "s"],
        "MB/s",
        repeat=repeat,
    )
    for what in (_STALL, _FIRST_STALL, _UNPREPARED_STALL):
        share = found[what, OURS, "ms"] / 10 / whole
        report.add(case, f"{what}, of a synchronous one", OURS, share, "%", repeat=repeat)


# ------------------------------------------------------------------------------------------------- on every rank


class _Training:
    """A model and its optimizer, and where everybody saves them."""

    def __init__(self, directory: Path, layers: int) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn

        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        model: nn.Module = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.is_distributed = dist.is_initialized()
        self.is_first = not self.is_distributed or dist.get_rank() == 0
        if self.is_distributed:
            model = nn.parallel.DistributedDataParallel(model)
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.directory = directory
        self._number = 0

    def fresh(self, name: str) -> Path:
        """A path that was not used before, the same on all ranks."""
        self._number += 1
        return self.directory / f"{name}_{self._number}"

    def manager(self, root: Path, **options: Any) -> CheckpointManager:
        from air_nb.checkpoint import CheckpointManager

        return CheckpointManager(root, model=self.model, optimizer=self.optimizer, keep=100, **options)

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def tensors(self) -> list[Any]:
        states = self.optimizer.state.values()
        return [*self.model.state_dict().values(), *(value for state in states for value in state.values())]

    def barrier(self) -> None:
        import torch.distributed as dist

        if self.is_distributed:
            dist.barrier()

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds, from when all ranks are there and the disk has nothing left of what came before."""
        if self.is_first:
            os.sync()
        self.barrier()
        started = time.perf_counter()
        action()
        return time.perf_counter() - started


def _measure(directory: Path, layers: int, times: int, backwards: bool) -> tuple[float, list[Taken]]:  # noqa: FBT001
    """What this rank measured, and the size of what was saved in MB (10^6 bytes)."""
    training = _Training(directory, layers)
    size_mb = sum(tensor.nbytes for tensor in training.tensors()) / 1e6
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        taken = [*_saves(training, times, backwards=backwards), *_stalls(training, times, backwards=backwards)]
        taken += _hashing(training, times)
        taken += _restores(training, times, backwards=backwards)
    return size_mb, taken


def _medians(
    training: _Training,
    what: str,
    actions: dict[str, Callable[[], float]],
    times: int,
    *,
    unit: str = "s",
    backwards: bool,
) -> list[Taken]:
    """Each tool's median, the tools taking turns."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(times):
        for name in reversed(actions) if backwards else actions:
            found[name].append(actions[name]() * (1000 if unit == "ms" else 1))
            training.barrier()
    return [Taken(what, name, statistics.median(values), unit) for name, values in found.items()]


def _saves(training: _Training, times: int, *, backwards: bool) -> list[Taken]:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from air_nb.checkpoint import VolumeWriter

    manager = training.manager(training.directory / "root")
    manager.save(0, wait=True)  # what is made once: groups, imports; and what is copied
    steps = iter(range(1, 1000))
    (source,) = (training.directory / "root").iterdir()

    def ours() -> float:
        return training.timed(lambda: manager.save(next(steps), wait=True))

    def with_writer(make: Callable[[Path], Any]) -> float:
        path = training.fresh("dcp")
        taken_s = training.timed(
            lambda: save(training.state(), storage_writer=make(path), no_dist=not training.is_distributed)
        )
        _remove(training, path)
        return taken_s

    actions = {
        OURS: ours,
        _DCP: lambda: with_writer(FileSystemWriter),
        _BACK_END: lambda: with_writer(VolumeWriter),
        _TORCH: lambda: _first_only(training, lambda path: _torch_save(training, path)),
        _COPY: lambda: _first_only(training, lambda path: _copy(source, path)),
    }
    taken = _medians(training, "synchronous save, on disk", actions, times, backwards=backwards)
    manager.close()
    return taken


def _first_only(training: _Training, action: Callable[[Path], object]) -> float:
    """Only the first rank saves, the others wait for it."""
    path = training.fresh("other")

    def save() -> None:
        if training.is_first:
            action(path)
        training.barrier()

    taken_s = training.timed(save)
    _remove(training, path)
    return taken_s


def _remove(training: _Training, path: Path) -> None:
    training.barrier()
    if training.is_first:
        path.unlink() if path.is_file() else shutil.rmtree(path)


def _torch_save(training: _Training, path: Path, *, sync: bool = True) -> None:
    import torch

    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        copy = target / file.name
        shutil.copyfile(file, copy)
        with copy.open("rb") as written:
            os.fsync(written.fileno())


def _stalls(training: _Training, times: int, *, backwards: bool) -> list[Taken]:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    first_ms = _first_stall_s(training) * 1000
    manager = training.manager(training.directory / "root")
    steps = iter(range(2000, 3000))
    buffers = [torch.empty_like(tensor) for tensor in training.tensors()]
    committed: list[float] = []

    def ours() -> float:
        started = time.perf_counter()
        stall_s = training.timed(lambda: manager.save(next(steps)))
        started = time.perf_counter() - stall_s
        manager.wait()
        committed.append(time.perf_counter() - started)
        return stall_s

    def theirs() -> float:
        path = training.fresh("dcp")
        futures: list[Any] = []
        writer = FileSystemWriter(path)  # to keep the copy's memory, torch asks for a GPU

        def begin() -> None:
            no_dist = not training.is_distributed
            futures.append(async_save(training.state(), storage_writer=writer, no_dist=no_dist))

        stall_s = training.timed(begin)
        futures[0].result()
        _remove(training, path)
        return stall_s

    def unsynced() -> float:
        return _first_only(training, lambda path: _torch_save(training, path, sync=False))

    def in_memory() -> float:
        return training.timed(lambda: [b.copy_(t) for b, t in zip(buffers, training.tensors(), strict=True)])

    first = [Taken(_FIRST_STALL, OURS, first_ms, "ms"), Taken(_UNPREPARED_STALL, OURS, ours() * 1000, "ms")]
    in_memory()
    committed.clear()
    actions = {OURS: ours, _DCP: theirs, _TORCH: unsynced, _MEMORY: in_memory}
    taken = _medians(training, _STALL, actions, times, unit="ms", backwards=backwards)
    manager.close()
    return [*taken, *first, Taken("asynchronous save, until committed", OURS, statistics.median(committed), "s")]


def _first_stall_s(training: _Training) -> float:
    """Of a loop that saves at its third step."""
    from air_nb.data import DataLoader

    root = training.fresh("first")
    with training.manager(root, data=DataLoader(range(1000)), every=3) as manager:
        steps = manager.steps()
        for _ in range(3):
            next(steps)
            time.sleep(_STEP_S)
        stall_s = training.timed(lambda: next(steps))
    _remove(training, root)
    return stall_s


def _hashing(training: _Training, times: int) -> list[Taken]:
    """Of all bytes, by one thread."""
    from air_nb.checkpoint.manifest import Digest

    contents = [tensor.numpy().reshape(-1).view("uint8") for tensor in training.tensors()]

    def hash_all() -> None:
        digest = Digest()
        for content in contents:
            digest.update(content)

    actions = {OURS: lambda: training.timed(hash_all)}
    return _medians(training, "hashing all of it", actions, times, unit="ms", backwards=False)


def _restores(training: _Training, times: int, *, backwards: bool) -> list[Taken]:
    """From the page cache; ours and our back end check every byte."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from air_nb.checkpoint import VolumeReader

    root, by_dcp, by_torch = (training.directory / name for name in ("root", "by_dcp", "by_torch"))
    no_dist = not training.is_distributed
    save(training.state(), storage_writer=FileSystemWriter(by_dcp), no_dist=no_dist)
    newest = training.manager(root).latest
    assert newest is not None
    if training.is_first:
        _torch_save(training, by_torch)

    def ours() -> float:
        manager = training.manager(root)
        taken_s = training.timed(manager.restore)
        manager.close()
        return taken_s

    def load_all(reader: Any) -> None:
        state = training.state()
        load(state, storage_reader=reader, no_dist=no_dist)
        set_state_dict(
            training.model,
            training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def torch_load() -> None:
        state = torch.load(by_torch, weights_only=True)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    def checked() -> float:
        path = training.fresh("checked")
        save(training.state(), storage_writer=_volume_writer(path), no_dist=no_dist)
        taken_s = training.timed(lambda: load_all(VolumeReader(path)))
        _remove(training, path)
        return taken_s

    actions = {
        OURS: ours,
        _DCP: lambda: training.timed(lambda: load_all(FileSystemReader(by_dcp))),
        _BACK_END: checked,
        _TORCH: lambda: training.timed(torch_load),
    }
    return _medians(training, "restore, from the page cache", actions, times, backwards=backwards)


def _volume_writer(path: Path) -> Any:
    from air_nb.checkpoint import VolumeWriter

    return VolumeWriter(path)
