"""One interface over directories and URLs: the same behaviour everywhere."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import time
import uuid

import fsspec
import pytest

from air_nb.checkpoint import store as store_module
from air_nb.checkpoint.store import DirectoryStore, open_store
from air_nb.data.fetch import Retries
from air_nb.errors import CheckpointError
from tests.support.stores import race_to_create


@pytest.fixture(params=["directory", "memory", "local fsspec"])
def store(request, tmp_path):
    match request.param:
        case "directory":
            return open_store(tmp_path / "root")
        case "memory":
            return open_store(f"memory://{uuid.uuid4().hex}")
        case _:  # real directories through fsspec, which have to be made first
            return open_store(f"local://{tmp_path}/root")


def test_what_was_written_is_read_listed_and_deleted(store):
    assert store.list() == {}
    assert store.directories() == ()
    store.write("a/one", b"12345")
    store.write("a/one", b"abcdefg")
    store.write("two", b"")
    assert store.read("a/one") == b"abcdefg"
    assert store.read("two") == b""
    assert store.size("a/one") == 7
    assert {name: file.size_bytes for name, file in store.list("a").items()} == {"one": 7}
    assert list(store.list()) == ["two"]
    assert store.directories() == ("a",)
    assert abs(store.list("a")["one"].modified_at - time.time()) < 3600
    assert store.child("a").read("one") == b"abcdefg"
    store.delete("a")
    assert store.directories() == ()
    assert store.list("a") == {}
    store.delete("a")
    store.delete("two")
    assert not store.exists("two")


def test_ranges_and_blocks_give_the_bytes(store, monkeypatch):
    monkeypatch.setattr(store_module, "_LOCAL_BLOCK_BYTES", 4)
    store.write("file", b"0123456789")
    assert store.read_range("file", 2, 3) == b"234"
    assert store.read_range("file", 8, 30) == b"89"
    assert store.read_range("file", 10, 5) == b""
    assert b"".join(store.blocks("file")) == b"0123456789"


def test_an_uploaded_file_is_the_local_one(store, tmp_path):
    local = tmp_path / "local"
    local.write_bytes(os.urandom(100_000))
    store.upload("deep/below/it", local)
    assert store.read("deep/below/it") == local.read_bytes()


def test_missing_files_are_file_not_found_everywhere(store):
    for read in (
        store.read,
        store.size,
        lambda name: list(store.blocks(name)),
        lambda name: store.read_range(name, 0, 1),
    ):
        with pytest.raises(FileNotFoundError):
            read("not/there")
    assert not store.exists("not/there")


def test_create_leaves_what_is_there(store):
    store.create("COMMIT", b"first")
    with pytest.raises(FileExistsError):
        store.create("COMMIT", b"second")
    assert store.read("COMMIT") == b"first"
    assert list(store.list()) == ["COMMIT"]


@pytest.mark.parametrize("error", [None, TypeError("mode?"), OSError("pre-conditions did not hold")])
def test_create_works_where_fsspec_knows_no_mode_or_says_so_in_other_words(monkeypatch, error):
    store = open_store(f"memory://{uuid.uuid4().hex}")
    memory = type(fsspec.filesystem("memory"))
    original = memory.pipe_file

    def pipe_file(system, path, value, mode="overwrite", **_):
        if error is not None and mode == "create" and (isinstance(error, TypeError) or system.exists(path)):
            raise error
        original(system, path, value)

    monkeypatch.setattr(memory, "pipe_file", pipe_file)
    test_create_leaves_what_is_there(store)


def test_of_many_that_create_the_same_file_one_wins(tmp_path):
    store = open_store(tmp_path)
    won = race_to_create(store, "COMMIT", 8)
    assert len(won) == 1
    assert store.read("COMMIT") == b"%d" % won[0]
    assert list(store.list()) == ["COMMIT"]


def test_create_without_links_is_still_exclusive(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EOPNOTSUPP, "no links")

    monkeypatch.setattr(os, "link", no_links)
    test_create_leaves_what_is_there(open_store(tmp_path))


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    store.write("file", b"old")

    def full(_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        store.write("file", b"new")
    assert store.read("file") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_reader_that_has_begun_reads_the_old_file_to_its_end(tmp_path):
    store = open_store(tmp_path)
    store.write("file", b"old" * 100_000)
    with (tmp_path / "file").open("rb") as reader:
        begun = reader.read(10)
        store.write("file", b"new")
        assert begun + reader.read() == b"old" * 100_000
    assert store.read("file") == b"new"


def test_a_root_that_is_a_file_is_said_to_be_one(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        open_store(tmp_path / "file")


def test_a_url_of_an_unknown_kind_names_what_to_install(monkeypatch):
    with pytest.raises(CheckpointError, match="nosuch://"):
        open_store("nosuch://bucket/x")


def test_file_urls_are_directories(tmp_path):
    store = open_store(f"file://{tmp_path}")
    assert isinstance(store, DirectoryStore)
    assert store.path == tmp_path


def test_opening_a_directory_makes_nothing(tmp_path):
    open_store(tmp_path / "root").list()
    assert list(tmp_path.iterdir()) == []


def test_stores_pickle(store):
    store.write("file", b"x")
    copy = pickle.loads(pickle.dumps(store))
    assert copy.url == store.url
    assert copy.read("file") == b"x"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(store_module, "_RETRIES", Retries(attempts=3, first_wait_s=0.001, longest_wait_s=0.001))


@pytest.mark.usefixtures("impatient")
def test_what_may_pass_is_tried_again_and_what_will_not_is_not(monkeypatch):
    store = open_store(f"memory://{uuid.uuid4().hex}")
    store.write("file", b"x")
    memory, calls = fsspec.filesystem("memory"), []

    def failing(error):
        def cat_file(*_, **__):
            calls.append(error)
            if len(calls) < 3:
                raise error
            return b"x"

        return cat_file

    monkeypatch.setattr(type(memory), "cat_file", failing(TimeoutError("slow")))
    assert store.read("file") == b"x"
    assert len(calls) == 3
    calls.clear()
    monkeypatch.setattr(type(memory), "cat_file", failing(PermissionError("no")))
    with pytest.raises(PermissionError):
        store.read("file")
    assert len(calls) == 1


@pytest.mark.usefixtures("impatient")
def test_a_local_disk_is_not_asked_twice_and_a_mount_is(tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path)
    calls = []

    def failing(_):
        calls.append(1)
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(type(tmp_path), "read_bytes", failing)
    for is_remote, expected in ((False, 1), (True, 3)):
        calls.clear()
        store._remote = is_remote
        with pytest.raises(OSError, match="broken"):
            store.read("file")
        assert len(calls) == expected


def test_listing_and_verifying_load_neither_torch_nor_any_client_of_a_store(tmp_path):
    program = (
        "import sys, air_nb.checkpoint as c\n"
        f"root = {str(tmp_path)!r}; c.list_checkpoints(root); c.find_latest_valid(root); c.prune(root, 3)\n"
        "print(sorted({'torch', 'numpy', 'fsspec', 'obstore', 'IPython.core'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
