"""The cache when many processes want more than it may hold, and when the disk is full."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from multiprocessing import resource_tracker
from pathlib import Path
from random import Random

import fsspec.asyn
import pytest

from air_nb.data import DataLoader, FileDataset
from air_nb.data.cache import Cache
from air_nb.data.fetch import Retries
from air_nb.data.files import list_files
from air_nb.data.space import Limits
from air_nb.errors import DataError
from tests.support import cache_processes
from tests.support.cache_processes import content, disk_bytes, started, write_files
from tests.support.http_files import serving


@pytest.fixture(scope="module", autouse=True)
def libraries_started():
    """What fsspec and multiprocessing open once for the whole process is not left behind by the first test."""
    fsspec.asyn.get_loop()
    resource_tracker.ensure_running()


def test_eight_processes_that_want_the_same_files_download_each_once(tmp_path):
    with serving() as server:
        server.files = {f"{number}.bin": content(f"{number}.bin", 5000) for number in range(20)}
        entries = list(list_files(f"{server.url}/", "*.bin"))
        cache = Cache(tmp_path / "cache", limits=Limits(min_free_bytes=0))
        with started(8, cache_processes.fetch_all, cache, entries) as running:
            for _, connection in running:
                connection.send("go")
            metrics = [connection.recv() for _, connection in running]
        assert set(server.gets.values()) == {1}
        assert sum(each.misses for each in metrics) == 20
        assert sum(each.hits + each.waited + each.misses for each in metrics) == 8 * 20


@pytest.mark.parametrize("use", [cache_processes.use_at_random, cache_processes.read_at_random])
@pytest.mark.parametrize(
    "n_files,size_bytes,max_bytes,batches",
    [
        (256, 16 * 2**10, 2**20, 25),
        pytest.param(1024, 2**20, 64 * 2**20, 20, marks=pytest.mark.slow),
    ],
    ids=["4 MiB through 1", "1 GiB through 64 MiB"],
)
def test_eight_processes_stay_below_the_cap_and_keep_what_they_use(
    tmp_path, n_files, size_bytes, max_bytes, batches, use
):
    write_files(tmp_path / "source", n_files, size_bytes)
    cache = Cache(tmp_path / "cache", limits=Limits(max_bytes=max_bytes, min_free_bytes=0, patience_s=120))
    arguments = (cache, str(tmp_path / "source"), batches, 4)
    with started(8, use, *arguments) as running:
        for _, connection in running:
            connection.send("go")
        reports = [connection.recv() for _, connection in running]  # EOFError: an assertion failed over there
    assert max(largest for largest, _ in reports) <= max_bytes
    assert sum(metrics.evictions for _, metrics in reports) > 0
    cache._connect()
    assert list(Path(cache.directory, "incoming").iterdir()) == []
    assert disk_bytes(Path(cache.directory)) == cache._space._read()[0]


def test_processes_that_read_all_there_is_and_need_more_do_not_wait_for_each_other(tmp_path):
    write_files(tmp_path / "source", 40, 2**14)
    # Room for 8 files, and each of 4 processes announces up to 16: nobody could evict, had they to keep them all.
    cache = Cache(tmp_path / "cache", limits=Limits(max_bytes=2**17, min_free_bytes=0, patience_s=120))
    arguments = (cache, str(tmp_path / "source"), 12, 16)
    with started(4, cache_processes.read_at_random, *arguments) as running:
        for _, connection in running:
            connection.send("go")
        reports = [connection.recv() for _, connection in running]
    assert max(largest for largest, _ in reports) <= 2**17
    assert sum(metrics.hits for _, metrics in reports) > 0


def test_a_process_that_reads_all_the_time_leaves_room_for_one_that_needs_some(tmp_path):
    write_files(tmp_path / "source", 8, 1000)
    cache = Cache(tmp_path / "cache", limits=Limits(max_bytes=4000, min_free_bytes=0, patience_s=60))
    dataset = FileDataset(tmp_path / "source", "**/*.bin", decode=_decode_slowly, cache=cache)
    dataset.__getitems__(range(4))
    with started(1, cache_processes.fetch_all, cache, [dataset.manifest[6]]) as [(_, connection)]:
        connection.send("go")
        batches = 0
        while not connection.poll():
            dataset.__getitems__(range(4))  # the whole cache, announced
            batches += 1
            assert batches < 200  # of 20 ms
        connection.recv()


def _decode_slowly(path: str) -> int:
    time.sleep(0.005)
    return len(path)


def test_processes_killed_at_any_moment_leave_nothing_that_the_next_start_does_not_sweep(tmp_path):
    write_files(tmp_path / "source", 64, 2**14)
    cache = Cache(tmp_path / "cache", limits=Limits(max_bytes=2**18, min_free_bytes=0, patience_s=120))
    chance = Random(5)
    for _ in range(3):
        with started(3, cache_processes.use_at_random, cache, str(tmp_path / "source"), 10_000, 3) as running:
            for process, connection in running:
                connection.send("go")
                time.sleep(chance.uniform(0.4, 1.2))
                process.kill()
    cache._connect()
    assert list(Path(cache.directory, "incoming").iterdir()) == []
    assert list(Path(cache.directory, "locks").iterdir()) == []
    assert len(list(Path(cache.directory, "leases").iterdir())) == 1
    assert disk_bytes(Path(cache.directory)) <= sum(cache._space._read()) <= 2**18
    for entry in list_files(tmp_path / "source"):
        lease = cache.lease(entry)
        assert Path(lease.path).read_bytes() == content(entry.path, 2**14)
        lease.release()
    assert disk_bytes(Path(cache.directory)) == cache._space._read()[0]


@pytest.mark.parametrize("are_killed", [False, True])
def test_versions_of_files_that_processes_want_at_once_never_take_each_others_place(tmp_path, are_killed):
    size_bytes, paths = 3000, ["a", "a/b", "a/b/c", "d/e", "d/f", "g", "h/i/j", "k"]
    cache = Cache(tmp_path / "cache", limits=Limits(max_bytes=14 * size_bytes, min_free_bytes=0, patience_s=120))
    rounds = 10_000 if are_killed else 300
    chance = Random(7)
    for _ in range(2 if are_killed else 1):
        with started(4, cache_processes.use_versions_at_random, cache, paths, rounds, size_bytes) as running:
            for _, connection in running:
                connection.send("go")
            if are_killed:
                for process, _ in running:
                    time.sleep(chance.uniform(0.4, 1.2))
                    assert process.is_alive()  # it has found nothing wrong
                    process.kill()
            else:
                assert sum(connection.recv().evictions for _, connection in running) > 100
    cache._connect()
    with cache._space._lock():
        files, names = list(cache._space._stored()), cache._space.names.all()
    unnamed = {file.inode for file in files} - set(names)  # their processes were killed just then
    assert len(unnamed) == len(files) - len(names) <= (8 if are_killed else 0)
    assert all(len(of_one) == 1 for of_one in names.values())
    assert sum(file.size_bytes for file in files) <= 14 * size_bytes


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a tmpfs")
    mount = tmp_path / "disk"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", mount], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"can't mount a tmpfs: {mounted.stderr}")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def test_what_is_cached_is_read_by_a_new_process_when_the_disk_is_full(tmp_path, small_disk):
    write_files(tmp_path / "source", 20, 1000)
    limits = Limits(min_free_bytes=-(2**40), patience_s=0.2)
    dataset = FileDataset(tmp_path / "source", "**/*.bin", decode=len, cache=Cache(small_disk / "cache", limits=limits))
    expected = dataset.__getitems__(range(20))
    with (small_disk / "others").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)) == 4096:
            pass
    assert shutil.disk_usage(small_disk).free == 0
    with started(1, cache_processes.read_all, small_disk / "cache", limits, tmp_path / "source") as [(_, connection)]:
        assert connection.recv() == expected


def test_a_disk_that_is_full_before_the_cap_is_made_room_on(tmp_path, small_disk):
    write_files(tmp_path / "source", 10, 2**20)
    entries = list(list_files(tmp_path / "source"))
    # No floor and no cap: the cache only learns from ENOSPC. Somebody else's file takes the rest.
    cache = Cache(small_disk / "cache", limits=Limits(min_free_bytes=-(2**40), patience_s=0.2))
    (small_disk / "others").write_bytes(bytes(2**20))
    for entry in entries:
        lease = cache.lease(entry)
        assert Path(lease.path).read_bytes() == content(entry.path, 2**20)
        lease.release()
    assert cache.metrics().evictions >= 7
    held = [cache.lease(entry) for entry in entries[-2:]]
    with pytest.raises(DataError, match=r"No space left.*no cached file is unused"):
        cache.lease(entries[0])
    assert all(Path(lease.path).read_bytes() for lease in held)
    assert list(Path(cache.directory, "incoming").iterdir()) == []


def test_the_floor_keeps_the_disk_from_filling_up(tmp_path, small_disk):
    write_files(tmp_path / "source", 20, 2**18)
    cache = Cache(small_disk / "cache", limits=Limits(min_free_bytes=2**21, patience_s=0.2))
    for entry in list_files(tmp_path / "source"):
        cache.lease(entry).release()
        disk = os.statvfs(small_disk)
        assert disk.f_bavail * disk.f_frsize >= 2**21
    assert cache.metrics().evictions > 0


_QUICK = Retries(attempts=3, first_wait_s=0.01, longest_wait_s=0.01, timeout_s=0.5)


@pytest.fixture
def server():
    with serving() as state:
        state.files = {f"train/{name}.bin": content(name, 10_000) for name in ("a", "b")}
        yield state


@pytest.fixture
def web_cache(tmp_path):
    return Cache(tmp_path / "cache", limits=Limits(min_free_bytes=0), retries=_QUICK)


def test_a_server_that_fails_twice_is_asked_a_third_time(server, web_cache):
    entry = list_files(f"{server.url}/train", "*.bin")[0]
    server.failures["train/a.bin"] = [500, 503]
    assert Path(web_cache.lease(entry).path).read_bytes() == content("a", 10_000)
    assert web_cache.metrics().retries == 2


def test_a_download_that_is_cut_off_is_repeated(server, web_cache):
    entry = list_files(f"{server.url}/train", "*.bin")[0]
    server.cut.add("train/a.bin")
    assert Path(web_cache.lease(entry).path).read_bytes() == content("a", 10_000)
    assert web_cache.metrics().retries == 1


@pytest.mark.parametrize("status", [403, 404])
def test_what_is_refused_is_not_asked_for_again(server, web_cache, status):
    entry = list_files(f"{server.url}/train", "*.bin")[0]
    server.failures["train/a.bin"] = [status] * 9
    with pytest.raises(DataError, match=r"a\.bin could not be fetched.*tried 1 time.*[Tt]rying again would not help"):
        web_cache.lease(entry)
    assert server.gets["train/a.bin"] == 1
    server.failures.clear()
    web_cache.lease(entry)


def test_a_server_that_hangs_is_given_up(server, web_cache):
    entry = list_files(f"{server.url}/train", "*.bin")[0]
    server.hanging.add("train/a.bin")
    with pytest.raises(DataError, match=r"a\.bin could not be fetched: .*Timeout.*tried 3 time.*[Cc]heck the network"):
        web_cache.lease(entry)
    assert list(Path(web_cache.directory, "incoming").iterdir()) == []
    assert list(Path(web_cache.directory, "locks").iterdir()) == []


def test_a_web_servers_directories_are_listed(server):
    server.files["train/deep/c.bin"] = b"c"
    manifest = list_files(f"{server.url}/train")
    assert manifest.paths == ("a.bin", "b.bin", "deep/c.bin")
    assert manifest.sizes_bytes == (10_000, 10_000, 1)
    assert all(manifest.versions)
    with pytest.raises(DataError, match="nowhere"):
        list_files(f"{server.url}/nowhere")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_loader_asks_once_for_a_file_that_is_refused(tmp_path, on_error):
    with serving() as server:
        server.files = {f"{number}.bin": content(f"{number}.bin", 500) for number in range(6)}
        cache = Cache(tmp_path / "cache", limits=Limits(min_free_bytes=0))
        dataset = FileDataset(f"{server.url}/", "*.bin", decode=os.path.getsize, cache=cache)
        server.failures["2.bin"] = [404] * 9
        loader = DataLoader(dataset, batch_size=6, num_workers=0, on_error=on_error)
        if on_error == "raise":
            with pytest.raises(DataError, match=r"2\.bin could not be fetched"):
                next(iter(loader))
        else:
            with pytest.warns(RuntimeWarning, match=r"2\.bin could not be fetched"):
                assert next(iter(loader)).tolist() == [500] * 5
        assert server.gets["2.bin"] == 1
