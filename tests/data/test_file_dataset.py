"""FileDataset: files as local paths or decoded, in a for loop and under torch's own DataLoader."""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from air_nb.data import DataLoader as OurDataLoader
from air_nb.data import FileDataset, files, progress
from air_nb.data.cache import Cache, CacheMetrics
from air_nb.data.space import Limits
from air_nb.errors import DataError
from tests.support.cache_processes import write_files
from tests.support.ranks import run_ranks


@pytest.fixture
def source(tmp_path):
    write_files(tmp_path / "source", 12, 100)
    return tmp_path / "source"


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache", limits=Limits(max_bytes=600, min_free_bytes=0, patience_s=0.2))


def test_files_of_a_disk_are_used_where_they_are(source):
    dataset = FileDataset(source, "**/*.bin")
    assert len(dataset) == 12
    assert list(dataset) == sorted(str(path) for path in source.rglob("*.bin"))
    assert dataset[-1] == str(source / "9/9.bin")
    with pytest.raises(IndexError):
        dataset[12]


def test_files_behind_a_url_come_from_the_nodes_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("AIR_NB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AIR_NB_CACHE_MIN_FREE_BYTES", "0")
    fsspec.filesystem("memory").pipe("/images/cat/1.jpg", b"cat")
    [path] = FileDataset("memory://images")
    assert path.startswith(str(tmp_path / "cache"))
    assert path.endswith("/cat/1.jpg")
    assert Path(path).read_bytes() == b"cat"
    fsspec.filesystem("memory").rm("/images", recursive=True)


def test_a_yielded_path_is_there_as_long_as_its_string(source, cache):
    dataset = FileDataset(source, cache=cache)  # 6 of 12 files fit
    held = [dataset[index] for index in range(6)]
    with pytest.raises(DataError, match="in use"):
        dataset[6]
    del held[0]
    assert Path(dataset[6]).is_file()
    assert all(Path(path).is_file() for path in held)
    held.clear()
    assert sum(Path(path).is_file() for path in dataset) == 12  # more than fit, a few at a time


def test_decode_makes_the_examples_and_its_errors_name_the_file(source, cache):
    dataset = FileDataset(source, decode=lambda path: Path(path).read_bytes()[0], cache=cache)
    assert [dataset[index] for index in range(12)] == list(dataset)
    assert dataset.metrics().misses >= 12
    bad = FileDataset(source, decode=_refuse, cache=cache)
    with pytest.raises(
        DataError, match=rf"decoding {re.escape(str(source))}/0/0\.bin \(item 0.*ValueError: not a picture"
    ):
        bad[0]


def _refuse(_path: str) -> None:
    raise ValueError("not a picture")


def test_a_shuffled_loop_has_another_order_each_epoch_and_the_same_for_a_seed(source):
    dataset = FileDataset(source, shuffle=True, seed=3)
    first, second = list(dataset), list(dataset)
    assert first != second
    assert sorted(first) == sorted(second) == list(FileDataset(source))
    again = FileDataset(source, shuffle=True, seed=3)
    again.set_epoch(1)
    assert list(again) == second


@pytest.mark.parametrize("method", [None, "fork", "spawn", "forkserver"])
def test_torchs_own_loader_keeps_the_files_of_a_batch(source, cache, method, forkserver):
    dataset = FileDataset(source, cache=cache)
    loader = DataLoader(
        dataset, batch_size=2, num_workers=1 if method else 0, prefetch_factor=1 if method else None,
        multiprocessing_context=method,
    )  # fmt: skip
    seen = []
    for batch in loader:
        assert [Path(path).is_file() for path in batch] == [True, True]
        seen += [Path(path).name for path in batch]
    assert seen == [entry.path.split("/")[1] for entry in dataset.manifest]


def test_it_is_listed_once_not_in_each_loader_worker(source, monkeypatch):
    dataset = FileDataset(source)
    monkeypatch.setattr(files, "_find_local", None)
    assert len(pickle.loads(pickle.dumps(dataset))) == 12


def test_progress_is_told_now_and_then_on_rank_0(capsys, monkeypatch):
    now = iter((100.0, 101.0, 106.0, 107.0, 112.0, 118.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    line = progress.FetchProgress("s3://bucket", 1000)
    for misses in (1, 20, 30, 30, 40):
        line.show(CacheMetrics(misses=misses, fetched_bytes=misses * 10**6))
    lines = capsys.readouterr().err.splitlines()
    assert [text.split(": ")[2].split(" of")[0] for text in lines] == ["20", "30", "40"]
    monkeypatch.setattr(progress, "_rank", lambda: 1)
    monkeypatch.setattr(time, "monotonic", lambda: 1e6)
    line.show(CacheMetrics(misses=50))
    assert capsys.readouterr().err == ""


def _count_listings(root: str, log: str) -> tuple[int, str]:
    dist.barrier()  # else a rank may end before another has connected to it
    listed = files._find_local

    def counted(*args):
        with Path(log).open("a") as file:
            file.write("x")
        return listed(*args)

    files._find_local = counted
    dataset = FileDataset(root)
    if dist.get_rank() == 1:
        FileDataset(root, "*/1.bin")  # only here: nobody waits
    return len(dataset), dataset.manifest.hash


def test_one_rank_lists_for_all(source, tmp_path, forkserver):
    log = tmp_path / "log"
    results = run_ranks(3, _count_listings, str(source), str(log))
    assert results == [(12, FileDataset(source).manifest.hash)] * 3
    assert log.read_text() == "xx"  # one for all, and the one of rank 1


def _error_of_listing(root: str) -> str:
    dist.barrier()
    try:
        FileDataset(root)
    except DataError as error:
        return str(error)
    return "none"


def test_a_listing_that_fails_fails_on_all_ranks(tmp_path, forkserver):
    errors = run_ranks(3, _error_of_listing, str(tmp_path / "nowhere"))
    assert len(set(errors)) == 1
    assert "nowhere can't be listed" in errors[0]


def _list_late(root: str) -> tuple[bool, int]:
    dist.destroy_process_group()
    dataset = FileDataset(root)
    was_listed = dataset._manifest is not None
    return was_listed, len(dataset)


def test_a_rank_without_a_process_group_lists_when_it_has_to(source, forkserver):
    assert run_ranks(1, _list_late, str(source)) == [(True, 12)]


def test_tensors_of_decoded_files_are_batched(source, forkserver):
    loader = DataLoader(FileDataset(source, decode=_tensor), batch_size=12, num_workers=1)
    assert next(iter(loader)).shape == (12, 1)


def _tensor(path: str) -> torch.Tensor:
    return torch.tensor([len(Path(path).read_bytes())])


class _Labelled(FileDataset):
    def __getitem__(self, index: int) -> tuple[Any, int]:
        return super().__getitem__(index), 100 + index


class _Together(FileDataset):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] + 1000 for index in indices]


def test_a_class_that_is_edited_while_it_is_used_is_taken_as_it_is_then(source):  # as %autoreload does it
    class Edited(FileDataset):
        pass

    dataset = Edited(source, decode=lambda path: 0)
    assert next(iter(OurDataLoader(dataset, 2, num_workers=0))).tolist() == [0, 0]
    Edited.__getitem__ = lambda _, index: 100 + index  # type: ignore[method-assign]
    assert next(iter(OurDataLoader(dataset, 2, num_workers=0))).tolist() == [100, 101]


@pytest.mark.parametrize("loader", [DataLoader, OurDataLoader])
@pytest.mark.parametrize("cached", [False, True])
def test_what_a_subclass_makes_of_an_item_is_what_loaders_get(source, cache, loader, cached):
    def decode(path: str) -> int:
        return int(Path(path).stem)

    options: dict[str, Any] = {"decode": decode, "cache": cache if cached else None}
    numbers, labels = next(iter(loader(_Labelled(source, **options), batch_size=3, num_workers=0)))
    assert labels.tolist() == [100, 101, 102]
    together = _Together(source, **options)
    assert next(iter(loader(together, batch_size=3, num_workers=0))).tolist() == (numbers + 1000).tolist()
    assert together[1] == numbers[1]


def test_indices_of_any_integer_type_are_the_same_items(source, cache):
    dataset = FileDataset(source, decode=lambda path: int(Path(path).stem), cache=cache)
    for _ in range(3):
        numbers: Any = np.arange(5)
        assert dataset.__getitems__(list(torch.arange(5))) == [dataset[index] for index in numbers]
    assert sum(place is not None for place in dataset._places) == 5
