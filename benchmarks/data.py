"""What a batch costs: files of this disk, of the cache and of a slow mount; a cache hit; going on at any position."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import io
import random
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.fresh import Taken, in_fresh_process
from benchmarks.measure import OURS
from benchmarks.report import Report, Settings
from tests.support.object_store import fuse_mount, s3_server, why_no_mount
from tests.support.ranks import forkserver_with_torch

if TYPE_CHECKING:
    import torch

__all__ = ["run"]

_TORCH = "torch"
_PEERS = {"webdataset": "webdataset", "litdata": "litdata", "streaming": "mosaicml-streaming"}
_BATCH = 32
_EPOCHS = 5  # the first one, and those of which the median is the second one
_WIDTH = 1024
_IMAGES = "JPEG images of 640 x 480"
_IMAGE_SIZE = (640, 480)
_JPEG = b"\xff\xd8"
_SHARDS = 4
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt(3)
_WORKERS = (0, 2)
_LATER = "a later epoch"
_FROM_CACHE = "a later epoch, from the cache"
_UNSEEDED = ", seed_examples=False"


def run(settings: Settings) -> Report:
    """Measure all cases."""
    report = Report("data", baselines=(_TORCH, *_PEERS.values()))
    with forkserver_with_torch():
        for kind, n_files in (("128 KiB", 100),) if settings.quick else (("16 KiB", 2000), ("128 KiB", 1000)):
            _local(report, settings, kind, n_files)
        if importlib.util.find_spec("PIL") is not None:
            _local(report, settings, _IMAGES, 60 if settings.quick else 400)
        _mounted(report, settings, 40 if settings.quick else 300)
        _hits(report, settings)
        _resume(report, settings)
    return report


def _add(report: Report, case: str, taken: Iterable[Taken], repeat: int) -> None:
    for one in taken:
        report.add(case, one.what, one.tool, one.value, one.unit, repeat=repeat)


def _write_files(directory: Path, n_files: int, size_bytes: int) -> None:
    directory.mkdir()
    for number in range(n_files):
        (directory / f"{number:06}.bin").write_bytes(random.randbytes(size_bytes))


# ------------------------------------------------------------------------------------- in a process of their own


def _write_images(directory: Path, n_files: int) -> None:
    """Photograph-like: a few colours that blend into each other, and noise; 40 to 50 KiB each."""
    import numpy as np
    from PIL import Image

    directory.mkdir()
    draw = np.random.default_rng(0)
    for number in range(n_files):
        colours = Image.fromarray(draw.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(_IMAGE_SIZE)
        noisy = np.asarray(colours, dtype=np.int16) + draw.integers(-9, 10, (*_IMAGE_SIZE[::-1], 3), dtype=np.int16)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(directory / f"{number:06}.jpg", quality=85)


def _tensor_of(content: bytes) -> torch.Tensor:
    """Decode an example: some of its bytes' means, float32 [1024]; of an image uint8 [height, width, 3]."""
    import torch

    if content.startswith(_JPEG):
        import numpy as np
        from PIL import Image

        return torch.from_numpy(np.array(Image.open(io.BytesIO(content)).convert("RGB")))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, _WIDTH).float().mean(0)


def _decode(path: str) -> torch.Tensor:
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib would cost more than some of what is compared
        return _tensor_of(file.read())


class _Paths:
    """What everybody writes for torch's DataLoader."""

    def __init__(self, directory: Path) -> None:
        self._paths = sorted(str(path) for path in directory.iterdir())

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return _decode(self._paths[index])


def _options(workers: int) -> dict[str, Any]:
    return {"batch_size": _BATCH, "num_workers": workers, "persistent_workers": workers > 0}


def _speed(loader: Any, n_files: int) -> float:
    """Files per second of one epoch; that of the first includes the start of the loader workers."""
    started = time.perf_counter()
    n_batches = sum(1 for _ in loader)
    taken_s = time.perf_counter() - started
    assert n_batches * _BATCH >= n_files, f"{n_batches} batches of {n_files} files"
    return n_files / taken_s


def _steady_memory() -> None:
    """Keep memory that was freed, and compute in one thread, as loader workers do: the same for all tools.

    Else the layout of the heap, which is a matter of luck, decides whether each batch's memory is had anew from the
    kernel: twice as fast or slow, whoever loads.
    """
    import torch

    libc = ctypes.CDLL(None)
    for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        if not libc.mallopt(option, 1 << 30):
            print(f"mallopt({option}) is refused: the figures will vary more", file=sys.stderr)
    torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to read the files.

    Attributes:
        tool: Whose loader it is.
        loader: It.
        cached: Whether it reads through a cache, which the first epoch fills.
        more: What else it is called.
    """

    tool: str
    loader: Any
    cached: bool = False
    more: str = ""

    def taken(self, speeds: Sequence[float]) -> Iterator[Taken]:
        """What is said of its epochs."""
        first, *later = speeds
        whats = ("first epoch, filling the cache", _FROM_CACHE) if self.cached else ("first epoch", _LATER)
        for what, value in zip(whats, (first, statistics.median(later)), strict=True):
            yield Taken(what + self.more, self.tool, value, "files/s")


def _in_turn(ways: Sequence[_Way], n_files: int, turn: int = 0) -> list[Taken]:
    """Epochs of all ways in one process, in turn.

    What memory a process happens to have makes the very same loader a quarter faster or slower than in the next one.
    """
    _steady_memory()
    speeds: dict[int, list[float]] = {number: [] for number in range(len(ways))}
    with contextlib.redirect_stderr(io.StringIO()):  # how far the downloads are
        for epoch in range(_EPOCHS):
            for place in range(len(ways)):
                number = (place + epoch + turn) % len(ways)
                speeds[number].append(_speed(ways[number].loader, n_files))
    return [one for number, way in enumerate(ways) for one in way.taken(speeds[number])]


def _of_torch(directory: Path, workers: int) -> _Way:
    from torch.utils.data import DataLoader

    dataset: Any = _Paths(directory)
    return _Way(_TORCH, DataLoader(dataset, shuffle=True, **_options(workers)))


def _of_ours(directory: Path, cache: Path | None, workers: int, *, seeded: bool = True) -> _Way:
    from air_nb.data import DataLoader, FileDataset
    from air_nb.data.cache import Cache

    dataset = FileDataset(directory, decode=_decode, shuffle=True, cache=None if cache is None else Cache(cache))
    loader = DataLoader(dataset, seed_examples=seeded, **_options(workers))
    return _Way(OURS, loader, cached=cache is not None, more="" if seeded else _UNSEEDED)


def _all_local(directory: Path, caches: Path, workers: int, turn: int) -> list[Taken]:
    ways = [_of_torch(directory, workers)]
    for seeded in (True, False):
        ways.append(_of_ours(directory, None, workers, seeded=seeded))
        ways.append(_of_ours(directory, caches / str(seeded), workers, seeded=seeded))
    return _in_turn(ways, len(_Paths(directory)), turn)


def _with_torch(directory: Path, workers: int) -> list[Taken]:
    return _in_turn([_of_torch(directory, workers)], len(_Paths(directory)))


def _with_ours(directory: Path, cache: Path, workers: int) -> list[Taken]:
    way = _of_ours(directory, cache, workers)
    return _in_turn([way], len(way.loader.dataset))


# ----------------------------------------------------------------------------------------------------- local files


def _local(report: Report, settings: Settings, kind: str, n_files: int) -> None:
    """Everything is in the page cache, so what is measured is what the loaders do."""
    with tempfile.TemporaryDirectory(prefix="air_nb_bench_") as directory:
        home = Path(directory)
        if kind == _IMAGES:
            _write_images(home / "files", n_files)
        else:
            _write_files(home / "files", n_files, int(kind.split(maxsplit=1)[0]) * 1024)
        peers = list(_prepared_peers(home))
        for repeat in settings.rounds:
            for workers in _WORKERS:
                case = f"{n_files} local {kind if kind == _IMAGES else f'files of {kind}'}, {workers} loader workers"
                _add(report, case, _one_round(home, peers, workers, repeat), repeat)


def _one_round(home: Path, peers: Sequence[str], workers: int, repeat: int) -> list[Taken]:
    files = home / "files"
    caches = home / f"caches_{repeat}_{workers}"
    caches.mkdir()
    jobs: list[tuple[Any, ...]] = [(_all_local, files, caches, workers, repeat)]
    jobs += [(_with_peer, peer, home / peer, workers) for peer in peers]
    by_job = [in_fresh_process(*job) for job in (jobs if repeat % 2 == 0 else jobs[::-1])]
    return list(_side_by_side([one for of_job in by_job for one in of_job]))


def _side_by_side(taken: Sequence[Taken]) -> Iterator[Taken]:
    """Torch has one way to do what we do in several: its values beside each of ours."""
    ours = {one.what for one in taken if one.tool == OURS}
    for one in taken:
        if one.tool != _TORCH:
            yield one
        for what in sorted(ours) if one.tool == _TORCH else ():
            if what.startswith(one.what):
                yield Taken(what, one.tool, one.value, one.unit)


# ------------------------------------------------------------------------------------------------------------ peers


def _prepared_peers(home: Path) -> Iterator[str]:
    """Peers that are installed; their data sets are made of the same files."""
    for module, name in _PEERS.items():
        if importlib.util.find_spec(module) is None:
            continue
        try:
            in_fresh_process(_prepare_peer, module, home / "files", home / module)
        except Exception as error:  # noqa: BLE001 - the border to a peer: it may be broken here
            print(f"{name} is installed, but does not work here: {error!r}", file=sys.stderr)
        else:
            yield module


def _prepare_peer(module: str, files: Path, target: Path) -> None:
    paths = sorted(files.iterdir())
    target.mkdir()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        match module:
            case "webdataset":
                for shard in range(_SHARDS):
                    with tarfile.open(target / f"{shard}.tar", "w") as tar:
                        for path in paths[shard::_SHARDS]:
                            tar.add(path, path.name)
            case "litdata":
                litdata: Any = importlib.import_module(module)
                inputs = [str(path) for path in paths]
                litdata.optimize(_read, inputs, str(target), chunk_bytes="16MB", num_workers=1)
            case "streaming":
                streaming: Any = importlib.import_module(module)
                with streaming.MDSWriter(out=str(target), columns={"content": "bytes"}, size_limit=1 << 24) as writer:
                    for path in paths:
                        writer.write({"content": path.read_bytes()})


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - as above
        return file.read()


def _with_peer(module: str, source: Path, workers: int) -> list[Taken]:
    from torch.utils.data import DataLoader

    n_files = len(list((source.parent / "files").iterdir()))
    loader: Any
    match module:
        case "webdataset":
            webdataset: Any = importlib.import_module(module)
            tars = [str(path) for path in sorted(source.glob("*.tar"))]
            shuffled = webdataset.WebDataset(tars, shardshuffle=_SHARDS).shuffle(1000)
            dataset = shuffled.to_tuple("bin").map_tuple(_tensor_of)
            loader = DataLoader(dataset, **_options(workers))
        case "litdata":
            litdata: Any = importlib.import_module(module)
            dataset = litdata.StreamingDataset(str(source), shuffle=True, transform=_tensor_of)
            loader = litdata.StreamingDataLoader(dataset, **_options(workers))
        case "streaming":
            streaming: Any = importlib.import_module(module)

            class Decoded(streaming.StreamingDataset):  # type: ignore[misc]
                def __getitem__(self, index: int) -> torch.Tensor:
                    return _tensor_of(super().__getitem__(index)["content"])

            dataset = Decoded(local=str(source), shuffle=True, batch_size=_BATCH)
            loader = DataLoader(dataset, **_options(workers))
    return _in_turn([_Way(_PEERS[module], loader)], n_files)


# ---------------------------------------------------------------------------------------------------- a slow source


def _mounted(report: Report, settings: Settings, n_files: int) -> None:
    """A real FUSE mount of a real S3 server on loopback: slow, but far from as slow as a real one."""
    kib = 128
    case = f"{n_files} files of {kib} KiB, FUSE mount of S3 on loopback"
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="air_nb_bench_")))
        try:
            reason = why_no_mount()
            server = stack.enter_context(s3_server(home)) if reason is None else None
        except pytest.skip.Exception as skipped:
            reason, server = str(skipped), None
        if server is None:
            report.add(case, _FROM_CACHE, OURS, reason)
            return
        mount = stack.enter_context(fuse_mount(server, home))
        _write_files(mount / "files", n_files, kib * 1024)
        for repeat in settings.rounds:
            for workers in _WORKERS:
                cache = home / f"cache_{repeat}_{workers}"
                jobs: list[tuple[Any, ...]] = [
                    (_with_torch, mount / "files", workers),
                    (_with_ours, mount / "files", cache, workers),
                ]
                by_job = [in_fresh_process(*job) for job in (jobs if repeat % 2 == 0 else jobs[::-1])]
                taken = _side_by_side([one for of_job in by_job for one in of_job])
                _add(report, f"{case}, {workers} loader workers", taken, repeat)


# ------------------------------------------------------------------------------------------------------- cache hits


def _hits(report: Report, settings: Settings) -> None:
    with tempfile.TemporaryDirectory(prefix="air_nb_bench_") as directory:
        home = Path(directory)
        _write_files(home / "files", 200, 1024)
        for repeat in settings.rounds:
            taken = in_fresh_process(_time_hits, home, 5 if settings.quick else 50)
            _add(report, "one file of the cache", taken, repeat)


def _nothing(_path: str) -> None:
    """Decodes nothing: what is left is the hit."""


def _time_hits(home: Path, times: int) -> list[Taken]:
    from air_nb.data import FileDataset
    from air_nb.data.cache import Cache

    dataset = FileDataset(home / "files", cache=Cache(home / "cache"))
    assert dataset.cache is not None
    cache, entries = dataset.cache, list(dataset.manifest)

    def lease() -> None:
        for entry in entries:
            cache.lease(entry).release()

    decoding = FileDataset(home / "files", cache=cache, decode=_nothing)
    indices = range(len(entries))
    actions: dict[tuple[str, str], Callable[[], Any]] = {
        ("a hit: lease and release", OURS): lease,
        ("a hit: dataset[i]", OURS): lambda: [dataset[index] for index in indices],
        ("a hit: for decode, in batches", OURS): lambda: [
            decoding.__getitems__(indices[first : first + _BATCH]) for first in indices[::_BATCH]
        ],
        ("open and read 1 KiB, no cache", _TORCH): lambda: [_read(entry.url) for entry in entries],
    }
    with contextlib.redirect_stderr(io.StringIO()):
        decoding.__getitems__(indices)
    taken = []
    for (what, tool), action in actions.items():
        started = time.perf_counter()
        for _ in range(times):
            action()
        taken.append(Taken(what, tool, (time.perf_counter() - started) / times / len(entries) * 1e6, "us"))
    return taken


# ------------------------------------------------------------------------------------------------- going on far in


_NUMBERS = 20_000_000
_POSITION = 10_000_000


class _Numbers:
    def __len__(self) -> int:
        return _NUMBERS

    def __getitem__(self, index: int) -> int:
        return index


def _resume(report: Report, settings: Settings) -> None:
    case = f"{_NUMBERS // 10**6} million examples, shuffled"
    for repeat in settings.rounds:
        _add(report, case, in_fresh_process(_time_resume), repeat)


def _time_resume() -> list[Taken]:
    from torch.utils.data import DataLoader

    from air_nb.data import DataLoader as OurDataLoader

    numbers: Any = _Numbers()
    taken = []
    for position in (0, _POSITION):
        loader = OurDataLoader(numbers, _BATCH, shuffle=True, num_workers=0)
        state = loader.state_dict() | {"position": position}
        started = time.perf_counter()
        loader.load_state_dict(state)
        next(iter(loader))
        taken.append(Taken(f"first batch at position {position:,}", OURS, time.perf_counter() - started, "s"))
        assert loader.state_dict()["position"] == position + _BATCH
    # torch has no state: going on, one goes through all that came before. This is its first batch at the start.
    started = time.perf_counter()
    next(iter(DataLoader(numbers, _BATCH, shuffle=True)))
    taken.append(Taken("first batch at position 0", _TORCH, time.perf_counter() - started, "s"))
    return taken
