"""Checkpoints on a real S3 server, and on a real FUSE mount of it."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from air_nb.checkpoint import VolumeReader, VolumeWriter, commit, list_checkpoints, prune, verify
from air_nb.checkpoint.remote import S3Store
from air_nb.checkpoint.stage import stages_directory
from air_nb.checkpoint.store import open_store
from tests.support.object_store import S3Server, fuse_mount, s3_server, why_no_mount
from tests.support.ranks import run_ranks
from tests.support.stores import race_to_create
from tests.support.wait import eventually

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.slow]

MIB = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        if importlib.util.find_spec("obstore") is not None:
            open_store(running.bucket_url).list()  # starts obstore's threads, which stay
        yield running


@pytest.fixture(scope="module", autouse=True)  # before each test's own fixtures, which look for what a test leaves
def mounted(server, tmp_path_factory) -> Iterator[Path | None]:
    if why_no_mount():
        yield None
        return
    with fuse_mount(server, tmp_path_factory.mktemp("mount")) as directory:
        yield directory


@pytest.fixture
def mount(mounted):
    return mounted or pytest.skip(str(why_no_mount()))


@pytest.fixture(params=["s3 by obstore", "s3 by fsspec", "fuse"])
def root(request, server, monkeypatch) -> str:
    """A fresh root on the server, by three ways."""
    name = uuid.uuid4().hex
    match request.param:
        case "fuse":
            return str(request.getfixturevalue("mount") / name)
        case "s3 by fsspec":
            pytest.importorskip("s3fs")
            monkeypatch.setattr("air_nb.checkpoint.remote._prefer_obstore", lambda: False)
            monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", server.endpoint)
        case _:
            pytest.importorskip("obstore")
    return f"{server.bucket_url}/{name}"


def make_state(seed: int, numbers: int = MIB):
    generator = torch.Generator().manual_seed(seed)
    weights = {f"t{number}": torch.randn(numbers, generator=generator) for number in range(3)}
    return {"weights": weights, "step": seed, "text": "x" * seed}


def assert_equal(found, expected) -> None:
    assert all(torch.equal(found["weights"][key], value) for key, value in expected["weights"].items())
    assert (found["step"], found["text"]) == (expected["step"], expected["text"])


def test_files_are_written_read_listed_and_deleted(root, tmp_path):
    store = open_store(root)
    assert store.is_remote
    assert (store.list(), store.directories(), store.exists("a/b")) == ({}, (), False)
    store.write("a/one", b"12345")
    store.write("a/one", b"abcdefg")
    store.write("two", b"")
    assert (store.read("a/one"), store.read("two"), store.size("a/one")) == (b"abcdefg", b"", 7)
    assert (store.read_range("a/one", 2, 3), store.read_range("a/one", 5, 9)) == (b"cde", b"fg")
    assert store.read_range("a/one", 7, 9) == b""
    assert {name: file.size_bytes for name, file in store.list("a").items()} == {"one": 7}
    assert (list(store.list()), store.directories()) == (["two"], ("a",))
    big = tmp_path / "big"
    big.write_bytes(os.urandom(33 * MIB + 1))  # more than one part
    store.upload("a/deep/big", big)
    assert b"".join(store.blocks("a/deep/big")) == big.read_bytes()
    store.delete("a")
    assert (store.list("a"), store.list("a/deep")) == ({}, {})
    for read in (
        store.read,
        store.size,
        lambda name: list(store.blocks(name)),
        lambda name: store.read_range(name, 0, 1),
    ):
        with pytest.raises(FileNotFoundError):
            read("not/there")
    store.delete("not/there")


def test_create_is_exclusive(root):
    store = open_store(root)
    won = race_to_create(store, "COMMIT", 6)
    assert len(won) == 1
    assert store.read("COMMIT") == b"%d" % won[0]
    with pytest.raises(FileExistsError):
        store.create("COMMIT", b"x")
    assert list(store.list()) == ["COMMIT"]


def test_what_was_saved_is_loaded_and_verified(root):
    dcp_save(make_state(3), storage_writer=VolumeWriter(f"{root}/step_3"))
    assert verify(f"{root}/step_3", deep=True).ok
    loaded = make_state(9)
    dcp_load(loaded, storage_reader=VolumeReader(f"{root}/step_3"))
    assert_equal(loaded, make_state(3))
    assert [info.step for info in list_checkpoints(root)] == [3]
    assert list(stages_directory().iterdir()) == []


def test_a_flipped_byte_on_the_server_is_found_before_any_tensor_is_touched(root):
    dcp_save(make_state(3), storage_writer=VolumeWriter(f"{root}/step_3"))
    store = open_store(f"{root}/step_3")
    name = max(store.list(), key=lambda entry: store.list()[entry].size_bytes)
    content = bytearray(store.read(name))
    content[len(content) // 2] ^= 1
    store.write(name, bytes(content))
    assert verify(store.url).ok
    assert not verify(store.url, deep=True).ok
    loaded = make_state(9)
    with pytest.raises(CheckpointException, match=name):
        dcp_load(loaded, storage_reader=VolumeReader(store.url))
    assert_equal(loaded, make_state(9))


def test_checkpoints_are_begun_listed_swept_and_pruned(root):
    for step in (1, 2, 3, 4):
        path = commit.begin(root, step)
        dcp_save(make_state(step, 10), storage_writer=VolumeWriter(path))
    open_store(commit.begin(root, 5)).write("__0_0.distcp", b"x")
    infos = list_checkpoints(root)
    assert [info.step for info in infos if info.state == "committed"] == [4, 3, 2, 1]
    assert [info.step for info in infos if info.state == "incomplete"] == [5]  # the server tells only whole seconds
    assert commit.sweep(root, grace_s=3600) == ()  # this process still lives
    assert len(prune(root, 2)) == 2
    assert {info.step for info in list_checkpoints(root)} == {5, 4, 3}


def test_torch_reads_on_the_mount_what_we_put_on_the_server_and_we_read_there_what_torch_wrote(server, mount):
    pytest.importorskip("obstore")
    name = uuid.uuid4().hex
    url = f"{server.bucket_url}/{name}"
    dcp_save(make_state(3), storage_writer=VolumeWriter(f"{url}/ours"))
    assert eventually((mount / name / "ours" / ".metadata").exists, 30)  # the mount looks again after a second
    loaded = make_state(9)
    dcp_load(loaded, storage_reader=FileSystemReader(mount / name / "ours"))
    assert_equal(loaded, make_state(3))
    dcp_save(make_state(4), storage_writer=FileSystemWriter(mount / name / "theirs", sync_files=False))
    dcp_load(loaded, storage_reader=VolumeReader(f"{url}/theirs"))
    assert_equal(loaded, make_state(4))


def save_on_ranks(path: str, environment: Mapping[str, str]) -> None:
    os.environ |= environment
    state = {"common": torch.arange(1000), f"own_{dist.get_rank()}": torch.full((MIB,), float(dist.get_rank()))}
    future = dcp_async_save(state, storage_writer=VolumeWriter(path))
    assert isinstance(future, Future)
    future.result()


def load_on_ranks(path: str, environment: Mapping[str, str]) -> None:
    os.environ |= environment
    state = {"common": torch.zeros(1000, dtype=torch.int64), "own_0": torch.zeros(MIB), "own_1": torch.zeros(MIB)}
    dcp_load(state, storage_reader=VolumeReader(path))
    assert torch.equal(state["common"], torch.arange(1000))
    assert [state[f"own_{rank}"].unique().tolist() for rank in range(2)] == [[0.0], [1.0]]


@pytest.mark.usefixtures("forkserver")
def test_ranks_save_and_another_number_of_ranks_loads(root, server):
    run_ranks(2, save_on_ranks, f"{root}/step_1", server.environment)
    assert verify(f"{root}/step_1", deep=True).ok
    run_ranks(3, load_on_ranks, f"{root}/step_1", server.environment)
    assert list(stages_directory().iterdir()) == []


def test_s3_goes_through_obstore_when_it_finds_the_credentials(server):
    pytest.importorskip("obstore")
    assert isinstance(open_store(server.bucket_url), S3Store)


def test_wrong_credentials_are_not_allowed_and_not_tried_again(server, monkeypatch):
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(OSError, match="403 Forbidden"):
        open_store(server.bucket_url).list()
