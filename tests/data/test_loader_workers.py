"""Loader workers: signals that are not meant for them, deaths that are explained, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from air_nb.data import DataLoader, FileDataset, workers
from air_nb.data.cache import Cache
from air_nb.data.leases import sweep_leases
from air_nb.errors import DataError
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("forkserver")


class Pids:
    """Each item is the process that read it."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class Deadly(Pids):
    """Item 3 ends the process that reads it."""

    def __init__(self, how: int) -> None:
        self.how = how

    def __getitem__(self, index: int) -> int:
        if index == 3:
            if self.how > 0:
                os.kill(os.getpid(), self.how)
            os._exit(-self.how)
        return index


class Stuck(Pids):
    """Item 1 never comes."""

    def __getitem__(self, index: int) -> int:
        while index == 1:
            time.sleep(1)
        return os.getpid()


def _message_of(loader: DataLoader, seen: list[int]) -> str:
    """The text of the error that a pass ends with; the error itself would keep the loader from going."""
    try:
        seen.extend(int(batch) for batch in loader)
    except DataError as error:
        return str(error)
    return "no error"


def _worker_pids() -> set[int]:
    return {process.pid for process in psutil.Process().children() if "resource_tracker" not in str(process.cmdline())}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_process_group_does_not_end_them(number):
    loader = DataLoader(Pids(), 1, num_workers=1, prefetch_factor=1, multiprocessing_context="fork")
    batches = iter(loader)
    pid = int(next(batches))
    os.kill(pid, number)
    assert {int(batch) for batch in batches} == {pid}


@pytest.mark.parametrize(
    "how, says",
    [
        (
            signal.SIGKILL,
            r"loader worker 1 \(pid \d+\) was killed by SIGKILL \(most often the system was out of memory",
        ),
        (signal.SIGBUS, r"killed by SIGBUS \(most often /dev/shm is full.*--shm-size"),
        (signal.SIGSEGV, r"killed by SIGSEGV"),
        (-7, r"exited with code 7"),
    ],
)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_dead_worker_is_an_error_that_names_the_signal_and_what_it_was_reading(how, says, persistent):
    loader = DataLoader(
        Deadly(how), 1, num_workers=2, prefetch_factor=1, persistent_workers=persistent, multiprocessing_context="fork"
    )
    seen: list[int] = []
    message = _message_of(loader, seen)
    assert re.search(says, message)
    assert message.endswith("it was reading item 3")
    assert seen == [0, 1, 2][: len(seen)]
    assert loader.state_dict()["position"] == len(seen)
    loader.dataset.how = 0
    loader.load_state_dict({**loader.state_dict(), "position": 4})
    assert [int(batch) for batch in loader] == [4, 5]  # with new workers


class DeadlyStream(Deadly):
    """Item 3 ends the process that reads it."""

    def examples(self, index: int, start: int = 0) -> Iterator[int]:
        yield self[index]


def test_a_dead_worker_of_a_stream_is_an_error_that_says_how_far_it_was():
    loader = DataLoader(DeadlyStream(signal.SIGKILL), 1, num_workers=2, multiprocessing_context="fork")
    seen: list[int] = []
    assert re.search(
        r"loader worker 1 .*SIGKILL.*it was reading item [13] or one of its next", _message_of(loader, seen)
    )


def test_a_worker_that_dies_during_a_step_is_reported_when_the_next_batch_is_asked_for():
    loader = DataLoader(Pids(), 1, num_workers=2, prefetch_factor=1, multiprocessing_context="fork")
    batches = iter(loader)
    pid = int(next(batches))
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)  # torch alone would raise here, or in the middle of a checkpoint
    with pytest.raises(DataError, match=rf"pid {pid}\) was killed by SIGKILL.*it was reading item 2"):
        next(batches)


def test_a_worker_that_is_stuck_is_killed_when_the_loop_is_left():
    loader = DataLoader(Stuck(), 1, num_workers=2, prefetch_factor=1, multiprocessing_context="fork")
    before = _worker_pids()
    batches = iter(loader)
    next(batches)
    assert len(_worker_pids() - before) == 2
    del batches
    assert _worker_pids() == before


def test_leaving_the_loop_ends_the_workers_at_once_unless_they_are_persistent():
    before = _worker_pids()
    loader = DataLoader(Pids(), 1, num_workers=1, multiprocessing_context="fork")
    for _ in loader:
        break
    assert _worker_pids() == before
    loader = DataLoader(Pids(), 1, num_workers=1, multiprocessing_context="fork", persistent_workers=True)
    pids = {int(batch) for _ in range(3) for batch in loader}
    for _ in loader:
        break
    assert pids == {int(batch) for batch in loader} == _worker_pids() - before
    del loader
    assert eventually(lambda: _worker_pids() == before)


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "1 / 0"])
def test_python_ends_while_persistent_workers_live(ending, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from air_nb.data import DataLoader\n"
        "loader = DataLoader([1, 2, 3], num_workers=1, persistent_workers=True, multiprocessing_context='fork')\n"
        "batches = iter(loader)\n"
        "next(batches)\n" + ending
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3, "1 / 0": 1}[ending]
    assert done.stderr.count("Traceback") == (ending == "1 / 0"), done.stderr


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_loader_workers_die_with_their_rank_even_in_the_middle_of_an_item(method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "from air_nb.data import DataLoader\n"
        "class Stuck:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index):\n"
        "        if index > 1: time.sleep(600)\n"
        "        return os.getpid()\n"
        "if __name__ == '__main__':\n"
        f"    loader = DataLoader(Stuck(), num_workers=2, multiprocessing_context='{method}')\n"
        "    batches = iter(loader)\n"
        "    print(int(next(batches)), int(next(batches)), flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        rank.kill()
        assert eventually(lambda: not any(map(_lives, pids)), timeout_s=10)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_batches_that_do_not_fit_into_shared_memory_are_foretold(monkeypatch):
    monkeypatch.setattr(workers, "_free_shm_bytes", lambda: 1 << 20)
    rows: Any = [torch.zeros(1 << 16) for _ in range(4)]
    loader = DataLoader(rows, 2, num_workers=1, prefetch_factor=4, multiprocessing_context="fork")
    with pytest.warns(RuntimeWarning, match=r"prefetch 4 batches of 0 MiB each, but /dev/shm has 1 MiB left"):
        list(loader)


def test_the_default_number_of_workers_follows_cores_ranks_and_shared_memory(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(workers, "_free_shm_bytes", lambda: 64 << 30)
    assert DataLoader(Pids()).num_workers == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert DataLoader(Pids()).num_workers == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert DataLoader(Pids()).num_workers == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(workers, "_free_shm_bytes", lambda: 64 << 20)
    with pytest.warns(RuntimeWarning, match="0 loader workers instead of 8: /dev/shm has 64 MiB left"):
        assert DataLoader(Pids()).num_workers == 0


# ---------------------------------------------------------------------------------------------------- files and leases


def _files(directory: Path, count: int) -> Path:
    root = directory / "files"
    root.mkdir()
    for number in range(count):
        (root / f"{number:02}.txt").write_text(str(number))
    return root


def _leased(cache: Path) -> set[str]:
    """Contents of the files that somebody who lives has leased."""
    sweep_leases(str(cache))
    inodes = {path.stat().st_ino for path in cache.glob("leases/*/*")}
    return {path.read_text() for path in cache.rglob("*.txt") if path.stat().st_ino in inodes}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_files_of_a_batch_are_leased_until_the_next_one_is_asked_for(tmp_path, num_workers):
    dataset = FileDataset(_files(tmp_path, 6), cache=Cache(tmp_path / "cache"))
    loader = DataLoader(dataset, 2, num_workers=num_workers, prefetch_factor=1 if num_workers else None)
    seen: list[set[str]] = []
    for batch in loader:
        assert isinstance(batch, list)
        names = {Path(path).read_text() for path in batch}
        assert names <= _leased(tmp_path / "cache")
        assert not {name for one in seen for name in one} & _leased(tmp_path / "cache")
        seen.append(names)
    assert sorted(map(int, set().union(*seen))) == list(range(6))
    assert _leased(tmp_path / "cache") == set()
    metrics = loader.metrics().cache
    assert metrics is not None
    assert metrics.misses == 6


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nothing_is_leased_any_more_when_the_loop_is_left(tmp_path, num_workers):
    dataset = FileDataset(_files(tmp_path, 6), cache=Cache(tmp_path / "cache"))
    loader = DataLoader(dataset, 2, num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    assert _leased(tmp_path / "cache")
    del batches
    assert eventually(lambda: _leased(tmp_path / "cache") == set())


def test_a_file_that_cannot_be_decoded_is_named(tmp_path):
    root = _files(tmp_path, 3)
    (root / "01.txt").write_text("one")
    with pytest.raises(DataError, match=r"01\.txt.*invalid literal for int"):
        list(DataLoader(FileDataset(root, decode=_read_number), num_workers=1, multiprocessing_context="fork"))


def _read_number(path: str) -> int:
    return int(Path(path).read_text())


def test_the_data_sets_own_seed_and_shuffle_are_used(tmp_path):
    root = _files(tmp_path, 20)
    dataset = FileDataset(root, decode=_read_number, shuffle=True, seed=3)
    ours = [int(row) for row in DataLoader(dataset, num_workers=0)]
    assert ours == [int(row) for row in DataLoader(range(20), shuffle=True, seed=3, num_workers=0)]
    state = DataLoader(dataset, num_workers=0).state_dict()
    assert state["manifest"] == dataset.manifest.hash
