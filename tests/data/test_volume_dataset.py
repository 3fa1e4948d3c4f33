"""UCVolumeDataset: as documented, under torch's own DataLoader and wrapped in a user's dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from air_nb.data import UCVolumeDataset
from air_nb.data.cache import Cache
from air_nb.data.space import Limits
from air_nb.errors import DataError
from tests.support.ranks import run_ranks


@pytest.fixture
def volume(tmp_path, monkeypatch):
    directory = tmp_path / "volumes" / "main" / "default" / "images"
    (directory / "below").mkdir(parents=True)
    (directory / "below" / "not listed.txt").touch()
    for number in range(11):
        (directory / f"{number:02}.txt").write_text(str(number))
    monkeypatch.setenv("AIR_NB_VOLUMES", str(tmp_path / "volumes"))
    return "/Volumes/main/default/images"


class _Decoded(IterableDataset[int]):
    """As in the documentation: a second dataset that decodes the paths of the first."""

    def __init__(self, paths: UCVolumeDataset) -> None:
        self._paths = paths

    def __iter__(self) -> Iterator[int]:
        for path in self._paths:
            yield int(Path(path).read_text())


def test_yields_the_files_of_one_level_sorted(volume, tmp_path):
    dataset = UCVolumeDataset(volume)
    assert [Path(path).name for path in dataset] == [f"{number:02}.txt" for number in range(11)]
    assert len(dataset) == 11


def test_paths_are_cached_copies_where_the_volume_is_behind_a_network(volume, tmp_path):
    cache = Cache(tmp_path / "cache", limits=Limits(min_free_bytes=0, max_bytes=20))
    dataset = UCVolumeDataset(volume, cache=cache)
    for _ in range(2):
        paths = [path for path in dataset if path.startswith(str(tmp_path / "cache")) and Path(path).is_file()]
        assert len(paths) == 11
    assert cache.metrics().hits == 11


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers_share_the_files(volume, method, forkserver):
    loader = DataLoader(
        _Decoded(UCVolumeDataset(volume)), batch_size=2, num_workers=2, multiprocessing_context=method
    )  # fmt: skip
    assert sorted(int(number) for batch in loader for number in batch) == list(range(11))


def _read(volume: str, workers: int, method: str | None) -> list[int]:
    dist.barrier()  # else a rank may end before another has connected to it
    loader = DataLoader(
        _Decoded(UCVolumeDataset(volume)), batch_size=None, num_workers=workers, multiprocessing_context=method
    )
    return [int(number) for number in loader]


@pytest.mark.parametrize("workers,method", [(0, None), (2, "fork"), (1, "spawn")])
def test_ranks_share_the_files(volume, tmp_path, workers, method, forkserver):
    shares = run_ranks(2, _read, str(tmp_path / "volumes/main/default/images"), workers, method)
    assert sorted(number for share in shares for number in share) == list(range(11))
    assert all(shares)


def _read_few(volume: str) -> int:
    dist.barrier()
    return len(list(UCVolumeDataset(volume)))


def test_fewer_files_than_ranks_leave_some_ranks_without(volume, forkserver, tmp_path):
    (tmp_path / "volumes" / "one").mkdir()
    (tmp_path / "volumes" / "one" / "a").touch()
    assert sorted(run_ranks(3, _read_few, str(tmp_path / "volumes" / "one"))) == [0, 0, 1]


def test_a_loop_goes_on_where_it_was(volume):
    dataset = UCVolumeDataset(volume)
    loop = iter(dataset)
    first = [next(loop) for _ in range(4)]
    state = dataset.state_dict()
    again = UCVolumeDataset(volume)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert first + list(again) == list(dataset)
    assert len(list(again)) == 11  # the epoch after


def test_a_state_of_other_files_or_another_split_is_refused(volume, tmp_path):
    dataset = UCVolumeDataset(volume)
    state = dataset.state_dict()
    with pytest.raises(DataError, match="slot"):
        dataset.load_state_dict(state | {"slot": [1, 2]})
    (tmp_path / "volumes/main/default/images/99.txt").touch()
    with pytest.raises(DataError, match="other files"):
        UCVolumeDataset(volume).load_state_dict(state)


def test_a_missing_volume_is_an_error_at_once(volume):
    with pytest.raises(DataError, match="nowhere can't be listed"):
        UCVolumeDataset("/Volumes/nowhere")
