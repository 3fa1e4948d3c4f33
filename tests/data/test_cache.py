"""The cache of a node: one copy of a file, within its limits, there as long as somebody uses it."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from random import Random

import pytest

from air_nb.data import FileDataset, announcement
from air_nb.data.announcement import NOTE, read_note
from air_nb.data.cache import Cache, Place, default_directory, default_limits
from air_nb.data.files import list_files
from air_nb.data.leases import Owner, being_read
from air_nb.data.locks import lock_directory
from air_nb.data.manifest import Entry
from air_nb.data.names import Names
from air_nb.data.space import Limits
from air_nb.errors import DataError
from tests.support import cache_processes
from tests.support.cache_processes import content, disk_bytes, started, write_files

_SIZE = 1000


@pytest.fixture
def source(tmp_path):
    write_files(tmp_path / "source", 20, _SIZE)
    return tmp_path / "source"


@pytest.fixture
def entries(source):
    return list(list_files(source))


@pytest.fixture
def make_cache(tmp_path):
    def make(**limits):
        return Cache(tmp_path / "cache", limits=Limits(**({"min_free_bytes": 0, "patience_s": 0.2} | limits)))

    return make


def _kept(cache: Cache) -> set[str]:
    """Names of the files that are in the cache."""
    return {path.name for path in Path(cache.directory, "paths").rglob("*.bin")}


def _leases(cache: Cache) -> list[Path]:
    return [path for path in Path(cache.directory, "leases").rglob("*") if path.is_file() and path.name != NOTE]


def _grow_older(cache: Cache) -> None:
    """Let a minute pass: times of use are not kept more precisely than to ten seconds."""
    for kept in Path(cache.directory, "objects").glob("*/*"):
        status = kept.stat()
        os.utime(kept, (status.st_atime - 60, status.st_mtime))


def test_a_file_is_copied_once_and_keeps_its_name(make_cache, entries):
    cache = make_cache()
    for _ in range(3):
        for entry in entries:
            lease = cache.lease(entry)
            assert Path(lease.path).read_bytes() == content(entry.path, _SIZE)
            assert lease.path.endswith("/" + entry.path)
            lease.release()
    metrics = cache.metrics()
    assert (metrics.misses, metrics.hits, metrics.fetched_bytes) == (20, 40, 20 * _SIZE)
    assert disk_bytes(Path(cache.directory)) == 20 * _SIZE
    assert _leases(cache) == []


def test_it_serves_the_next_run_too(make_cache, entries):
    make_cache().lease(entries[0]).release()
    again = make_cache()
    again.lease(entries[0]).release()
    assert again.metrics().hits == 1


def test_a_changed_file_is_fetched_anew(make_cache, source, entries):
    cache = make_cache()
    cache.lease(entries[0]).release()
    (source / entries[0].path).write_bytes(b"new" * 333 + b"!")
    changed = next(iter(list_files(source)))
    lease = cache.lease(changed)
    assert Path(lease.path).read_bytes() == b"new" * 333 + b"!"


def _change(source: Path, entry: Entry, content_now: bytes) -> Entry:
    """Another file of the same name and size."""
    path = source / entry.path
    path.write_bytes(content_now)
    os.utime(path, (1, int(content_now[0])))
    [changed] = [one for one in list_files(source) if one.path == entry.path]
    assert (changed.size_bytes, changed.version != entry.version) == (entry.size_bytes, True)
    return changed


def test_versions_of_a_file_are_there_at_once_each_with_its_content_and_go_one_by_one(make_cache, source, entries):
    cache = make_cache()
    old_content = content(entries[0].path, _SIZE)
    leases, places, contents = [], [], [old_content, b"1" * _SIZE, b"2" * _SIZE]
    for number, content_then in enumerate(contents):
        entry = _change(source, entries[0], content_then) if number else entries[0]
        leases.append(cache.lease(entry))
        places.append(cache.place(entry))
    for one in (cache, make_cache()):
        with one.reading(places) as reading:
            assert [Path(path).read_bytes() for path in reading.paths()] == contents
    assert len({lease.path for lease in leases}) == 3
    for lease in leases:
        assert lease.path.endswith("/" + entries[0].path)
        lease.release()
        assert cache._space.evict(1) == 1
        assert not Path(lease.path).exists()
    assert list(Path(cache.directory, "paths").rglob("*")) == []
    lease = cache.lease(_change(source, entries[0], b"3" * _SIZE))
    assert lease.path == leases[0].path  # below its root, which is free again


@pytest.mark.parametrize("how", ["evicted", "deleted by hand"])
@pytest.mark.parametrize("is_seen", [True, False])
def test_who_knows_an_older_version_is_not_given_a_newer_one_of_the_same_name_and_size(
    make_cache, source, entries, is_seen, how
):
    cache, other = make_cache(), make_cache()
    [place] = _fill(cache, entries[:1])
    if is_seen:
        with cache.reading([place]) as reading:
            assert list(reading.paths()) == [place.path]
    if how == "evicted":
        assert other._space.evict(1) == 1
    else:
        Path(other._space.names.object_path(place.key)).unlink()
    lease = other.lease(_change(source, entries[0], b"1" * _SIZE))
    assert lease.path == place.path
    with cache.reading([place]) as reading:
        assert list(reading.paths()) == []
    assert cache._try_lease(cache._connect(), place) is None


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_name_may_once_be_that_of_a_file_and_once_that_of_a_directory(make_cache, tmp_path, first):
    cache, names = make_cache(), ["both", "both/below", "both/below/it"]  # in a store even at the same time
    entries = [Entry(str(tmp_path / "root" / name), name, len(name), "1") for name in names]
    for entry in entries[first:] + entries[:first]:
        shutil.rmtree(tmp_path / "root", ignore_errors=True)
        Path(entry.url).parent.mkdir(parents=True)
        Path(entry.url).write_text(entry.path)
        cache.lease(entry).release()
    for one in (cache, make_cache()):
        with one.reading([one.place(entry) for entry in entries]) as reading:
            assert [Path(path).read_text() for path in reading.paths()] == names
        for entry in entries:
            assert Path(one.lease(entry).path).read_text() == entry.path
    assert cache.metrics().misses == 3
    for _ in entries:
        assert cache._space.evict(1) == 1
    assert list(Path(cache.directory, "paths").rglob("*")) == []


def test_a_file_that_has_a_name_and_could_not_be_leased_gets_no_second_one(make_cache, entries, monkeypatch):
    cache = make_cache()
    cache.lease(entries[0]).release()
    link, refusals = os.link, [OSError(errno.ENOSPC, "No space left on device")]

    def link_or_refuse(source: str, target: str) -> None:
        if "/leases/" in target and refusals:
            raise refusals.pop()
        link(source, target)

    monkeypatch.setattr(os, "link", link_or_refuse)
    lease = cache.lease(entries[1])  # evicts the other one, and tries again
    assert Path(lease.path).read_bytes() == content(entries[1].path, _SIZE)
    lease.release()
    assert refusals == []
    assert cache._space.evict(1) == 1


def test_a_file_with_more_names_than_it_should_have_goes_with_all_of_them(make_cache, entries):
    cache = make_cache()
    [place] = _fill(cache, entries[:1])
    more = Path(cache.directory, "paths", place.key[:2], place.key, entries[0].path)  # as an earlier version named it
    more.parent.mkdir(parents=True)
    os.link(place.path, more)
    lease = cache.lease(entries[0])
    assert cache._space.evict(1) == 0
    lease.release()
    assert cache._space.evict(1) == 1
    assert list(Path(cache.directory, "paths").rglob("*")) == []


def test_the_directories_of_names_are_those_of_the_root(make_cache, source, entries):
    cache = make_cache()
    _fill(cache, entries)
    directories = [path for path in Path(cache.directory, "paths").glob("*/**/") if path.is_dir()]
    assert len(directories) == len({Path(entry.path).parent for entry in entries}) + 1
    for lease in [cache.lease(entry) for entry in entries]:
        lease.release()
    assert cache.metrics().misses == len(entries)


def _cut(kept: Path) -> None:
    kept.chmod(0o600)
    os.truncate(kept, 10)


@pytest.mark.parametrize("damage", [_cut, Path.unlink])
def test_a_damaged_copy_is_fetched_anew(make_cache, entries, damage):
    cache = make_cache()
    path = cache.lease(entries[0]).path
    damage(Path(path))
    lease = cache.lease(entries[0])
    assert Path(lease.path).read_bytes() == content(entries[0].path, _SIZE)
    assert cache.metrics().hits == 0


def test_what_was_not_used_for_longest_goes_first(make_cache, entries):
    cache = make_cache(max_bytes=3 * _SIZE)
    for index in (0, 1, 2, 0, 3):
        cache.lease(entries[index]).release()
        _grow_older(cache)
    assert _kept(cache) == {Path(entries[index].path).name for index in (0, 2, 3)}
    assert cache.metrics().evictions == 1


def test_a_file_in_use_is_not_evicted_and_its_space_is_waited_for(make_cache, entries):
    cache = make_cache(max_bytes=3 * _SIZE)
    held = [cache.lease(entry) for entry in entries[:3]]
    with pytest.raises(DataError) as caught:
        cache.lease(entries[3])
    assert "3,000 bytes are cached, 3,000 of them in use" in str(caught.value)
    assert "AIR_NB_CACHE_MAX_BYTES" in str(caught.value)
    assert all(Path(lease.path).exists() for lease in held)
    held[1].release()
    cache.lease(entries[3])
    assert Path(held[0].path).exists()
    assert not Path(held[1].path).exists()
    assert disk_bytes(Path(cache.directory)) == 3 * _SIZE


def test_files_that_another_process_reads_stay_and_go_with_it(make_cache, entries):
    cache = make_cache(max_bytes=3 * _SIZE)
    for entry in entries[:3]:
        cache.lease(entry).release()
    with started(1, cache_processes.read_and_stand_still, cache, entries[:2]) as [(process, connection)]:
        assert connection.recv() is True
        lease = cache.lease(entries[3])  # in the room of the one that is not read
        assert _kept(cache) == {Path(entries[index].path).name for index in (0, 1, 3)}
        with pytest.raises(DataError, match="3,000 bytes are cached, 3,000 of them in use"):
            cache.lease(entries[4])
        assert cache._space.evict(1) == 0  # a full disk is no reason either
        process.kill()
        process.join()
        lease.release()
        assert cache._space.evict(3 * _SIZE) == 3


def _fill(cache: Cache, entries: list[Entry]) -> list[Place]:
    for entry in entries:
        cache.lease(entry).release()
    return [cache.place(entry) for entry in entries]


def test_an_eviction_waits_for_a_reader_that_ends(make_cache, entries):
    cache, other = make_cache(max_bytes=_SIZE, patience_s=60), make_cache(max_bytes=_SIZE, patience_s=60)
    [place] = _fill(cache, entries[:1])
    with cache.reading([place]) as reading:
        [path] = reading.paths()
        thread = threading.Thread(target=lambda: other.lease(entries[1]), name="evictor")
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert Path(path).exists()
    thread.join(30)
    assert _kept(cache) == {Path(entries[1].path).name}


@pytest.mark.parametrize("current", [0, 1])
def test_who_waits_for_room_keeps_no_more_than_the_file_that_is_being_read(make_cache, entries, current):
    cache = make_cache(max_bytes=2 * _SIZE)
    places = _fill(cache, entries[:2])
    with cache.reading(places) as reading:
        paths = reading.paths()
        assert [next(paths) for _ in range(current + 1)][-1] == places[current].path
        cache.lease(entries[2]).release()  # while decoding it
        assert Path(places[current].path).exists()
        assert not Path(places[1 - current].path).exists()
        assert list(paths) == []
        assert list(reading.paths(1 - current)) == []
        assert next(reading.paths(current)) == places[current].path  # from here on one is announced at a time
        assert read_note(cache._connect().directory) == [places[current].key]


def test_what_was_announced_while_somebody_may_evict_does_not_count(make_cache, entries):
    cache = make_cache()
    places = _fill(cache, entries[:1])
    with lock_directory(cache.directory, timeout_s=1), cache.reading(places) as reading:
        assert list(reading.paths()) == []
    with cache.reading(places) as reading:
        assert list(reading.paths()) == [places[0].path]


def test_only_one_reader_of_a_process_announces_and_the_others_are_told_to_lease(make_cache, entries):
    cache = make_cache()
    places = _fill(cache, entries[:2])
    seen = []

    def another() -> None:
        with cache.reading(places[1:]) as reading:
            seen.append(list(reading.paths()))

    with cache.reading(places[:1]) as reading:
        another()
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        assert list(reading.paths()) == [places[0].path]
    another()
    assert seen == [[], [], [places[1].path]]


def test_the_note_says_what_is_read_and_nothing_when_it_is_over(make_cache, entries):
    cache = make_cache()
    places = [cache.place(entry) for entry in entries]
    for n_files in (20, 3):
        with cache.reading(places[:n_files]):
            assert read_note(cache._connect().directory) == [place.key for place in places[:n_files]]
        assert read_note(cache._connect().directory) == []


def test_a_file_that_was_there_is_looked_for_again_once_anything_was_evicted(make_cache, entries):
    cache = make_cache(max_bytes=2 * _SIZE)
    places = _fill(cache, entries[:2])
    for number, expected in enumerate((places, places[1:], [])):
        with cache.reading(places) as reading:
            found = [place for index, place in enumerate(places) if place.path in list(reading.paths(index))]
        assert found == expected
        wanted = entries[2 + number : 3 + number]
        with started(1, cache_processes.fetch_all, cache, wanted) as [(_, connection)]:  # evicts the one used before
            connection.send("go")
            connection.recv()


def test_a_file_that_is_read_again_after_a_minute_counts_as_used_then(make_cache, entries, monkeypatch):
    cache = make_cache()
    (place,) = _fill(cache, entries[:1])

    def use() -> float:
        _grow_older(cache)
        before_s = Path(place.path).stat().st_atime
        with cache.reading([place]) as reading:
            assert list(reading.paths()) == [place.path]
        return Path(place.path).stat().st_atime - before_s

    assert use() >= 60  # never seen before
    assert use() == 0
    after_a_minute_s = time.monotonic() + announcement._LOOK_AGAIN_S
    monkeypatch.setattr(time, "monotonic", lambda: after_a_minute_s)
    assert use() >= 60


def test_who_waits_for_files_that_are_read_has_them_announced_one_at_a_time(make_cache, entries):
    cache = make_cache()
    places = _fill(cache, entries[:3])
    directory = cache._connect().directory
    with cache.reading(places):
        assert read_note(directory) == [place.key for place in places]
        assert cache._space.evict(1) == 0
    with cache.reading(places) as reading:
        for place, path in zip(places, reading.paths(), strict=True):
            assert path == place.path
            assert read_note(directory) == [place.key]


def _read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


@pytest.mark.parametrize("damage", [_cut, Path.unlink])
def test_a_damaged_copy_is_not_read(make_cache, source, damage):
    cache = make_cache()
    dataset = FileDataset(source, "**/*.bin", decode=_read_bytes, cache=cache)
    damage(Path(cache.lease(dataset.manifest[0]).path))
    assert dataset[0] == content(dataset.manifest[0].path, _SIZE)
    assert cache.metrics().hits == 0


def _read_exactly(path: str) -> bytes:
    read = Path(path).read_bytes()
    assert len(read) == _SIZE
    return read


@pytest.mark.parametrize("damage", [_cut, Path.unlink])
def test_a_copy_that_is_damaged_later_is_fetched_anew_when_it_cant_be_decoded(make_cache, source, damage):
    cache = make_cache()
    dataset = FileDataset(source, "**/*.bin", decode=_read_exactly, cache=cache)
    expected = [content(entry.path, _SIZE) for entry in dataset.manifest]
    for _ in range(2):  # the second time they are there
        assert dataset.__getitems__(range(20)) == expected
    damage(Path(cache.place(dataset.manifest[7]).path))
    assert dataset.__getitems__(range(20)) == expected


def test_a_reader_that_forks_keeps_its_note(make_cache, entries):
    cache = make_cache()
    places = _fill(cache, entries[:1])
    with cache.reading(places) as reading:
        pid = os.fork()
        if pid == 0:
            with cache.reading(places) as own:
                os._exit(0 if list(own.paths()) else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert list(reading.paths()) == [places[0].path]
        assert read_note(cache._connect().directory) == [places[0].key]


def test_a_child_that_is_forked_while_decoding_and_unwinds_writes_nowhere(make_cache, source, tmp_path):
    """Its copy of the note's descriptor is closed, and may be any file that the child has opened since."""
    children = []

    def decode(path: str) -> bytes:
        if os.fork() == 0:
            files = [(tmp_path / f"file{number}").open("wb", buffering=0) for number in range(5)]
            for file in files:
                file.write(b"the child's own data")
            raise SystemExit
        children.append(os.wait()[1])
        return Path(path).read_bytes()

    cache = make_cache()
    places = _fill(cache, list(list_files(source))[:2])
    dataset = FileDataset(source, "**/*.bin", decode=decode, cache=cache)
    pid = os.getpid()
    try:
        assert len(dataset.__getitems__([0, 1])) == 2
    except SystemExit:
        os._exit(0)
    finally:
        if os.getpid() != pid:
            os._exit(1)
    assert children == [0, 0]
    assert {(tmp_path / f"file{number}").read_bytes() for number in range(5)} == {b"the child's own data"}
    with cache.reading(places) as reading:
        assert len(list(reading.paths())) == 2


def test_a_child_that_is_forked_while_the_cache_is_locked_does_not_keep_the_lock(make_cache, entries):
    cache = make_cache()
    cache.lease(entries[0]).release()
    told, tell = os.pipe()
    with lock_directory(cache.directory, timeout_s=1):
        pid = os.fork()
        if pid == 0:
            os.close(tell)
            os.read(told, 1)  # until the parent lets go
            os._exit(0)
    with lock_directory(cache.directory, timeout_s=1):
        pass
    os.close(tell)
    os.waitpid(pid, 0)
    os.close(told)


def test_interrupts_wherever_they_strike_leave_nothing_announced_or_locked(make_cache, source):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    cache = make_cache()
    dataset = FileDataset(source, "**/*.bin", decode=len, cache=cache)
    assert dataset.__getitems__(range(20)) == dataset.__getitems__(range(20))
    places = [cache.place(entry) for entry in dataset.manifest]
    chance = Random(3)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(500):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 1e-3))
                while True:
                    dataset.__getitems__(range(8))
            assert read_note(cache._connect().directory) == []
            with lock_directory(cache.directory, timeout_s=0):
                pass
            with cache.reading(places) as reading:
                assert len(list(reading.paths())) == 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_note_of_which_only_a_part_fits_on_the_disk_does_not_count(make_cache, entries):
    cache = make_cache()
    places = _fill(cache, entries)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))  # writes up to there, and says how much
    try:
        with cache.reading(places) as reading:
            for place, path in zip(places, reading.paths(), strict=True):
                assert path == place.path
                assert read_note(cache._connect().directory) == [place.key]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_cache_that_is_deleted_while_it_is_used_is_made_anew(make_cache, source):
    cache = make_cache()
    dataset = FileDataset(source, "**/*.bin", decode=_read_bytes, cache=cache)
    expected = [content(entry.path, _SIZE) for entry in dataset.manifest]
    for _ in range(2):
        assert dataset.__getitems__(range(20)) == expected
    shutil.rmtree(cache.directory)
    assert dataset.__getitems__(range(20)) == expected
    with cache.reading([cache.place(dataset.manifest[0])]) as reading:
        assert len(list(reading.paths())) == 1
        assert len(being_read(cache.directory)) == 1


def test_threads_that_use_it_first_at_once_have_one_owner(tmp_path):
    for number in range(10):
        cache = Cache(tmp_path / f"cache{number}", limits=Limits(min_free_bytes=0))
        start = threading.Barrier(8)
        owners: list[Owner] = []

        def use(cache: Cache = cache, start: threading.Barrier = start, owners: list[Owner] = owners) -> None:
            start.wait()
            owners.append(cache._connect())

        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(owners) == 8
        assert len(set(map(id, owners))) == 1


def test_a_file_of_two_roots_can_be_evicted(make_cache, source):
    cache = make_cache(max_bytes=2 * _SIZE)
    for root in (source / "0", source):
        cache.lease(next(iter(list_files(root)))).release()
    held = [cache.lease(entry) for entry in list(list_files(source))[5:7]]
    assert len(_kept(cache)) == len(held)


def test_an_object_that_was_deleted_by_hand_gets_its_name_back(make_cache, entries):
    cache = make_cache()
    lease = cache.lease(entries[0])
    Path(cache._space.names.object_path(cache.place(entries[0]).key)).unlink()
    lease.release()
    lease = cache.lease(entries[0])
    kept = Path(cache._space.names.object_path(cache.place(entries[0]).key))
    assert Path(lease.path).samefile(kept)
    assert Path(lease.path).read_bytes() == content(entries[0].path, _SIZE)


def test_a_start_that_is_killed_before_it_has_discarded_what_is_suspect_is_repeated(make_cache, entries, monkeypatch):
    cache = make_cache()
    lease = cache.lease(entries[0])
    Path(cache.directory, "boot").write_text("another boot")
    with monkeypatch.context() as patched:
        patched.setattr(Names, "delete", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make_cache()._connect()
    make_cache()._connect()
    assert not Path(lease.path).exists()


def test_reading_leaves_no_descriptor_open(make_cache, source):
    cache = make_cache()

    def decode(path: str) -> None:
        raise ZeroDivisionError

    dataset = FileDataset(source, "**/*.bin", decode=decode, cache=cache)

    def open_files() -> int:
        for index in range(len(dataset)):
            with pytest.raises(DataError, match="ZeroDivisionError"):
                dataset[index]
        return sum(cache.directory in os.path.realpath(path) for path in Path("/proc/self/fd").iterdir())

    assert open_files() == 3  # the process's note, the cache and its ledger
    assert open_files() == 3


def test_two_leases_of_one_file_end_one_by_one(make_cache, entries):
    cache = make_cache(max_bytes=_SIZE)
    first, second = cache.lease(entries[0]), cache.lease(entries[0])
    first.release()
    first.release()
    with pytest.raises(DataError):
        cache.lease(entries[1])
    second.release()
    cache.lease(entries[1])


def test_a_file_larger_than_the_cache_is_refused_at_once(make_cache, entries):
    cache = make_cache(max_bytes=_SIZE - 1, patience_s=3600)
    with pytest.raises(
        DataError, match=r"1,000 bytes\) does not fit .* may hold 999 bytes: raise AIR_NB_CACHE_MAX_BYTES"
    ):
        cache.lease(entries[0])


def test_the_disks_floor_is_kept_and_an_empty_cache_says_so_at_once(make_cache, tmp_path, entries):
    free = shutil.disk_usage(tmp_path).free
    cache = make_cache(min_free_bytes=2 * free, patience_s=3600)
    with pytest.raises(DataError, match=r"must stay so.*AIR_NB_CACHE_MIN_FREE_BYTES"):
        cache.lease(entries[0])


def test_a_lease_ends_with_its_object_and_travels_with_its_pickle(make_cache, entries):
    cache = make_cache()
    lease = cache.lease(entries[0])
    again = pickle.loads(pickle.dumps(lease))
    lease.release()  # handed over: nothing to release
    assert len(_leases(cache)) == 1
    del again
    assert _leases(cache) == []
    cache.lease(entries[0])
    assert _leases(cache) == []


def test_a_forked_child_does_not_end_its_parents_leases(make_cache, entries):
    cache = make_cache()
    lease = cache.lease(entries[0])
    pid = os.fork()
    if pid == 0:
        lease.release()
        ok = len(_leases(cache)) == 1
        other = cache.lease(entries[1])  # with an owner of its own
        ok = ok and len(_leases(cache)) == 2 and Path(other.path).exists()
        other.release()
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    make_cache()._connect()  # sweeps what the child left
    assert len(_leases(cache)) == 1


def test_names_in_a_store_cant_lead_out_of_the_cache(make_cache, source):
    cache = make_cache()
    for number, name in enumerate(("../../escape", "a/../../b", "/abs", "x" * 300 + ".jpg")):
        entry = Entry(str(source / "0" / "0.bin"), name, _SIZE, str(number))
        lease = cache.lease(entry)
        assert Path(lease.path).resolve().is_relative_to(Path(cache.directory, "paths"))
        assert Path(lease.path).name.endswith(Path(name).name[-4:])


def test_a_lease_handed_over_outlives_its_process_one_kept_does_not(make_cache, entries):
    cache = make_cache(max_bytes=2 * _SIZE)
    with started(2, cache_processes.hold, cache, entries[0]) as [(_, first), (_, second)]:
        paths = {first.recv(), second.recv()}
        first.send("send")
        second.send("keep")
        lease = first.recv()
        assert paths == {lease.path}
        assert len(_leases(cache)) == 2
    cache.lease(entries[1]).release()
    cache.lease(entries[2]).release()  # evicts: entries[1], as entries[0] is in use
    assert Path(lease.path).exists()
    assert len(_leases(cache)) == 1
    lease.release()
    cache.lease(entries[3])
    cache.lease(entries[4])
    assert not Path(lease.path).exists()


def test_what_a_killed_process_held_is_evicted(make_cache, entries):
    cache = make_cache(max_bytes=_SIZE)
    with started(1, cache_processes.hold, cache, entries[0]) as [(process, connection)]:
        path = connection.recv()
        with pytest.raises(DataError, match="in use"):
            cache.lease(entries[1])
        process.kill()
        process.join()
        cache.lease(entries[1])
        assert not Path(path).exists()


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_process_killed_in_a_download_leaves_nothing(make_cache, entries, is_resumed):
    cache = make_cache(max_bytes=2 * _SIZE)
    with started(1, cache_processes.open_slowly, cache, entries[0]) as [(process, connection)]:
        temporary = Path(connection.recv())
        assert temporary.read_bytes() == b"half"
        process.kill()
        process.join()
    if is_resumed:
        lease = cache.lease(entries[0])  # whoever wants the same file next
        assert Path(lease.path).read_bytes() == content(entries[0].path, _SIZE)
    else:
        cache._connect()  # the next start
        assert list(Path(cache.directory, "locks").iterdir()) == []
    assert not temporary.exists()
    assert len(list(Path(cache.directory, "leases").iterdir())) == 1
    for entry in entries[1:3]:  # its space is not lost either
        cache.lease(entry).release()
    assert disk_bytes(Path(cache.directory)) <= 2 * _SIZE


def test_downloads_that_a_power_cut_may_have_emptied_are_not_trusted(make_cache, entries):
    cache = make_cache()
    old, new = cache.lease(entries[0]), cache.lease(entries[1])
    kept = cache._space.names.object_path
    from air_nb.data.cache import _key

    os.utime(kept(_key(entries[0])), (1, 1))
    Path(cache.directory, "boot").write_text("another boot")
    make_cache()._connect()
    assert Path(old.path).exists()
    assert not Path(new.path).exists()


def test_where_and_how_large_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("AIR_NB_CACHE_DIR", str(tmp_path / "here"))
    assert default_directory() == tmp_path / "here"
    assert default_limits() == Limits()
    monkeypatch.setenv("SGC_FSLAYER_MIN_FREE_DISK_BYTES", "7")
    assert default_limits().min_free_bytes == 7
    monkeypatch.setenv("AIR_NB_CACHE_MIN_FREE_BYTES", "0")
    monkeypatch.setenv("AIR_NB_CACHE_MAX_BYTES", "9")
    assert default_limits() == Limits(max_bytes=9, min_free_bytes=0)
    monkeypatch.setenv("AIR_NB_CACHE_MAX_BYTES", "9 GB")
    with pytest.raises(ValueError, match="AIR_NB_CACHE_MAX_BYTES='9 GB' is not a number of bytes"):
        default_limits()


def test_the_cache_is_private(make_cache, entries):
    cache = make_cache()
    cache.lease(entries[0])
    assert Path(cache.directory).stat().st_mode & 0o777 == 0o700
