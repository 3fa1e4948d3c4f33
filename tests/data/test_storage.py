"""``dcp.save`` and ``dcp.load`` through our back ends: both ways with torch's own, and nothing touched by damage."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.device_mesh import init_device_mesh

import air_nb.data
from air_nb.checkpoint import VolumeReader, VolumeWriter, find_latest_valid, list_checkpoints, verify
from air_nb.checkpoint.commit import read_manifest
from air_nb.checkpoint.manifest import COMMIT_FILE, MANIFEST_FILE, METADATA_FILE, record_of
from air_nb.checkpoint.stage import stages_directory
from air_nb.checkpoint.storage import UCVolumeReader, UCVolumeWriter
from air_nb.checkpoint.store import DirectoryStore, open_store
from air_nb.checkpoint.volume_reader import _merged
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def make_state(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    model = {
        "weight": torch.randn(64, 33, generator=generator),
        "half": torch.randn(17, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.zeros(0, 3),
        "strided": torch.randn(10, 8, generator=generator)[::2, ::2],
        "flags": torch.tensor([True, False, bool(seed % 2)]),
    }
    return {"model": model, "step": seed, "history": [seed, "text", {"lr": 0.1 * seed}]}


def flat(state):
    return {**state["model"], "step": state["step"], "history": state["history"]}


def assert_equal(found, expected) -> None:
    found, expected = flat(found), flat(expected)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
            assert found[key].dtype == value.dtype, key
        else:
            assert found[key] == value, key


@pytest.fixture(params=["disk", "mount", "memory"])
def target(request, tmp_path, monkeypatch) -> str:
    """A directory of a disk; one that is taken for a mount, so that files are staged; a URL."""
    if request.param == "mount":
        monkeypatch.setattr(DirectoryStore, "is_remote", True)
    return f"memory://{uuid.uuid4().hex}/step_3" if request.param == "memory" else str(tmp_path / "root" / "step_3")


# -------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("thread_count", [None, 1, 3, 100])
@pytest.mark.parametrize("single_file_per_rank", [True, False])
def test_what_was_saved_is_loaded(target, thread_count, single_file_per_rank):
    writer = VolumeWriter(target, single_file_per_rank=single_file_per_rank, thread_count=thread_count)
    dcp_save(make_state(5), storage_writer=writer)
    loaded = make_state(9)
    dcp_load(loaded, storage_reader=VolumeReader(target))
    assert_equal(loaded, make_state(5))
    assert verify(target, deep=True).ok
    assert list(stages_directory().iterdir()) == []


@pytest.mark.parametrize("thread_count", [1, 4])
def test_torch_reads_what_we_wrote_and_we_read_what_torch_wrote(tmp_path, thread_count):
    dcp_save(make_state(5), storage_writer=VolumeWriter(tmp_path / "ours", thread_count=thread_count))
    dcp_save(make_state(6), storage_writer=FileSystemWriter(tmp_path / "theirs", thread_count=thread_count))
    for path, seed in (("ours", 5), ("theirs", 6)):
        for reader in (FileSystemReader, VolumeReader):
            loaded = make_state(9)
            dcp_load(loaded, storage_reader=reader(tmp_path / path))
            assert_equal(loaded, make_state(seed))
    loaded = make_state(9)
    dcp_load(loaded, checkpoint_id=tmp_path / "ours")  # torch chooses its own reader
    assert_equal(loaded, make_state(5))


def test_a_stock_fsspec_checkpoint_is_read(tmp_path):
    url = f"memory://{uuid.uuid4().hex}/step_1"
    dcp_save(make_state(4), checkpoint_id=url)
    loaded = make_state(9)
    dcp_load(loaded, storage_reader=VolumeReader(url))
    assert_equal(loaded, make_state(4))
    dcp_load(loaded := make_state(8), checkpoint_id=url)
    assert_equal(loaded, make_state(4))


def test_torch_s_export_of_one_file_works_on_ours(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_save({"model": make_state(5)["model"]}, storage_writer=VolumeWriter(tmp_path / "ours"))
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt")["model"]
    assert torch.equal(loaded["weight"], make_state(5)["model"]["weight"])


def test_part_of_a_checkpoint_reads_only_the_ranges_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(DirectoryStore, "is_remote", True)
    state = {"small": torch.arange(10), "large": torch.zeros(2**20)}
    dcp_save(state, storage_writer=FileSystemWriter(tmp_path / "stock"))
    read: list[int] = []
    original = DirectoryStore.read_range

    def read_range(store, name, start, length):
        read.append(length)
        return original(store, name, start, length)

    monkeypatch.setattr(DirectoryStore, "read_range", read_range)
    loaded = {"small": torch.zeros(10, dtype=torch.int64)}
    dcp_load(loaded, storage_reader=VolumeReader(tmp_path / "stock"))
    assert torch.equal(loaded["small"], state["small"])
    assert 0 < sum(read) < 10_000


def test_without_verification_only_the_ranges_of_ours_are_fetched_too(tmp_path, monkeypatch):
    monkeypatch.setattr(DirectoryStore, "is_remote", True)
    state = {"small": torch.arange(10), "large": torch.zeros(2**20)}
    dcp_save(state, storage_writer=VolumeWriter(tmp_path / "step_1", thread_count=1))
    monkeypatch.setattr(DirectoryStore, "blocks", lambda *_: pytest.fail("a whole file was read"))
    loaded = {"small": torch.zeros(10, dtype=torch.int64)}
    dcp_load(loaded, storage_reader=VolumeReader(tmp_path / "step_1", verify=False))
    assert torch.equal(loaded["small"], state["small"])


def test_asynchronous_saves_commit_too(tmp_path):
    save_twice_asynchronously(tmp_path, AsyncCheckpointerType.THREAD)


def test_asynchronous_saves_by_a_process_commit_too(tmp_path):
    # In a process of its own, because the one that torch starts stays until its parent ends.
    process = multiprocessing.get_context("spawn").Process(
        target=save_twice_asynchronously, args=(tmp_path, AsyncCheckpointerType.PROCESS)
    )
    process.start()
    process.join(150)
    assert process.exitcode == 0
    process.close()


def save_twice_asynchronously(root: Path, checkpointer: AsyncCheckpointerType) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=0, world_size=1)
    try:
        for step in (1, 2):
            writer = VolumeWriter(root / f"step_{step}")
            state = make_state(step)
            future = dcp_async_save(state, storage_writer=writer, async_checkpointer_type=checkpointer)
            state["model"]["weight"].zero_()  # what comes after the call is not saved
            assert isinstance(future, Future)
            future.result()
            assert verify(root / f"step_{step}", deep=True).ok
            loaded = make_state(9)
            dcp_load(loaded, storage_reader=VolumeReader(root / f"step_{step}"))
            assert_equal(loaded, make_state(step))
    finally:
        dist.destroy_process_group()


def test_safetensors_are_passed_through(tmp_path):
    pytest.importorskip("safetensors")
    state = {"weight": torch.ones(3)}
    dcp_save(state, storage_writer=VolumeWriter(tmp_path / "s", serialization_format=SerializationFormat.SAFETENSORS))
    assert verify(tmp_path / "s", deep=True).ok


def test_the_documented_names_are_the_same_classes():
    assert UCVolumeWriter is VolumeWriter is air_nb.data.UCVolumeWriter
    assert UCVolumeReader is VolumeReader is air_nb.data.UCVolumeReader


def files_of(store):
    manifest = read_manifest(store)
    assert manifest is not None
    return dict(manifest.files)


def test_the_records_are_those_of_the_files(target):
    writer = VolumeWriter(target, thread_count=2)
    dcp_save(make_state(1), storage_writer=writer)
    store = open_store(target)
    assert writer.files == writer.all_files == files_of(store)
    assert {METADATA_FILE, "__0_0.distcp", "__0_1.distcp"} == writer.files.keys()
    for name, record in writer.files.items():
        assert record_of(store.read(name)) == record
    assert [info.step for info in list_checkpoints(target.rpartition("/")[0])] == [3]


def test_without_commit_it_is_left_to_the_caller(target):
    writer = VolumeWriter(target, commit=False)
    dcp_save(make_state(1), storage_writer=writer)
    assert not {COMMIT_FILE, MANIFEST_FILE} & open_store(target).list().keys()
    assert METADATA_FILE in writer.all_files


def test_one_writer_serves_many_checkpoints(tmp_path):
    writer = VolumeWriter(tmp_path / "unused")
    for step in (1, 2):
        dcp_save(make_state(step), checkpoint_id=tmp_path / f"step_{step}", storage_writer=writer)
    reader = VolumeReader(tmp_path / "unused")
    for step in (2, 1):
        loaded = make_state(9)
        dcp_load(loaded, checkpoint_id=tmp_path / f"step_{step}", storage_reader=reader)
        assert_equal(loaded, make_state(step))
    assert [info.step for info in list_checkpoints(tmp_path)] == [2, 1]


def test_overwriting_leaves_no_file_of_the_old_one(target):
    dcp_save(make_state(1), storage_writer=VolumeWriter(target, thread_count=3))
    dcp_save(make_state(2), storage_writer=VolumeWriter(target, thread_count=1))
    names = set(open_store(target).list())
    assert names == {"__0_0.distcp", METADATA_FILE, MANIFEST_FILE, COMMIT_FILE}
    loaded = make_state(9)
    dcp_load(loaded, storage_reader=VolumeReader(target))
    assert_equal(loaded, make_state(2))


def test_overwriting_is_refused_when_asked_to(target):
    dcp_save(make_state(1), storage_writer=VolumeWriter(target))
    with pytest.raises(CheckpointException, match="holds a checkpoint already"):
        dcp_save(make_state(2), storage_writer=VolumeWriter(target, overwrite=False))
    dcp_load(loaded := make_state(9), storage_reader=VolumeReader(target))
    assert_equal(loaded, make_state(1))


# --------------------------------------------------------------------------------------------------------------- damage


def test_no_checkpoint_is_said_to_be_none(target):
    with pytest.raises(CheckpointException, match="no checkpoint in"):
        dcp_load(make_state(1), storage_reader=VolumeReader(target))


def harm(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    match how:
        case "flip":
            content[len(content) // 2] ^= 4
            path.write_bytes(bytes(content))
        case "truncate":
            os.truncate(path, len(content) - 1)
        case _:
            path.unlink()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_1.distcp", METADATA_FILE, MANIFEST_FILE])
def test_damage_is_found_before_any_tensor_is_touched(tmp_path, monkeypatch, name, how, staged):
    monkeypatch.setattr(DirectoryStore, "is_remote", staged)
    path = tmp_path / "step_1"
    dcp_save(make_state(1), storage_writer=VolumeWriter(path, thread_count=2))
    harm(path / name, how)
    loaded = make_state(9)
    with pytest.raises(CheckpointException) as caught:
        dcp_load(loaded, storage_reader=VolumeReader(path))
    assert name in str(caught.value)
    assert_equal(loaded, make_state(9))
    assert list(stages_directory().iterdir()) == []


def test_a_metadata_that_is_whole_but_not_the_committed_one_is_refused(tmp_path):
    for step in (1, 2):
        dcp_save(make_state(step), storage_writer=VolumeWriter(tmp_path / f"step_{step}"))
    (tmp_path / "step_1" / METADATA_FILE).write_bytes((tmp_path / "step_2" / METADATA_FILE).read_bytes())
    with pytest.raises(CheckpointException, match="not what was committed"):
        dcp_load(make_state(9), storage_reader=VolumeReader(tmp_path / "step_1"))


def test_torch_s_own_reader_loads_a_flipped_byte_without_a_word(tmp_path):
    """Why there are digests. If this fails, torch has learnt to check, and so much the better."""
    state = {"weight": torch.zeros(1000)}
    dcp_save(state, storage_writer=FileSystemWriter(tmp_path / "stock"))
    file = tmp_path / "stock" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    position = content.index(bytes(4000)) + 2003  # in the middle of the numbers
    content[position] = 0x3F
    file.write_bytes(bytes(content))
    dcp_load(state, storage_reader=FileSystemReader(tmp_path / "stock"))
    assert state["weight"].count_nonzero() == 1


def test_all_damaged_files_are_named_at_once(tmp_path):
    dcp_save(make_state(1), storage_writer=VolumeWriter(tmp_path / "s", thread_count=3))
    harm(tmp_path / "s" / "__0_0.distcp", "flip")
    harm(tmp_path / "s" / "__0_2.distcp", "delete")
    with pytest.raises(CheckpointException) as caught:
        dcp_load(make_state(9), storage_reader=VolumeReader(tmp_path / "s"))
    assert "__0_0.distcp is not what was written" in str(caught.value)
    assert "__0_2.distcp is missing" in str(caught.value)


def test_each_file_is_checked_once(tmp_path, monkeypatch):
    dcp_save(make_state(1), storage_writer=VolumeWriter(tmp_path / "s", thread_count=2))
    checked: list[str] = []
    original = DirectoryStore.blocks

    def blocks(store, name):
        checked.append(name)
        return original(store, name)

    monkeypatch.setattr(DirectoryStore, "blocks", blocks)
    dcp_load(make_state(9), storage_reader=VolumeReader(tmp_path / "s"))
    assert sorted(checked) == ["__0_0.distcp", "__0_1.distcp"]


@given(st.lists(st.tuples(st.integers(0, 10 * 2**20), st.integers(0, 3 * 2**20)), max_size=20))
def test_merged_ranges_hold_all_bytes_and_few_others(ranges):
    merged = _merged(ranges)
    assert all(any(start <= offset and offset + length <= end for start, end in merged) for offset, length in ranges)
    assert all(first_end + 2**20 <= second_start for (_, first_end), (second_start, _) in pairwise(merged))
    assert sum(end - start for start, end in merged) <= sum(length for _, length in ranges) + 2**20 * len(ranges)


def test_only_files_that_are_needed_are_read(tmp_path):
    state = {"first": torch.ones(1000), "second": torch.ones(999)}
    dcp_save(state, storage_writer=VolumeWriter(tmp_path / "s", thread_count=2))
    harm(tmp_path / "s" / "__0_1.distcp", "delete")  # the larger tensor is in the first
    dcp_load({"first": torch.zeros(1000)}, storage_reader=VolumeReader(tmp_path / "s"))


# ---------------------------------------------------------------------------------------------------------------- ranks


def sharded(seed: int, rows: int = 24):
    whole = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "w": distribute_tensor(whole, mesh, [Shard(0)]),
        "replicated": whole[:2] + 0,
        f"own_{dist.get_rank()}": seed,
    }


def save_on_ranks(path, staged, asynchronously):
    DirectoryStore.is_remote = staged  # type: ignore[method-assign] # of this rank's own process
    writer = VolumeWriter(path, thread_count=2)
    if asynchronously:
        future = dcp_async_save(sharded(7), storage_writer=writer)
        assert isinstance(future, Future)
        future.result()
    else:
        dcp_save(sharded(7), storage_writer=writer)
    return dict(writer.files), dict(writer.all_files)


def load_on_ranks(path, staged):
    DirectoryStore.is_remote = staged  # type: ignore[method-assign] # of this rank's own process
    state = sharded(8)
    del state[f"own_{dist.get_rank()}"]
    before = state["w"].full_tensor().clone()
    try:
        dcp_load(state, storage_reader=VolumeReader(path))
    except CheckpointException as error:
        assert torch.equal(state["w"].full_tensor(), before), "a failed load has changed a tensor"
        return sorted(error.failures)
    expected = sharded(7)
    assert torch.equal(state["w"].full_tensor(), expected["w"].full_tensor())
    assert torch.equal(state["replicated"], expected["replicated"])
    return []


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("staged,asynchronously", [(False, False), (True, True)])
def test_the_coordinator_knows_the_files_of_all_ranks_and_any_number_of_ranks_loads_them(
    tmp_path, staged, asynchronously
):
    path = str(tmp_path / "step_1")
    results = run_ranks(3, save_on_ranks, path, staged, asynchronously)
    own, everything = [files for files, _ in results], results[0][1]
    assert everything == own[0] | own[1] | own[2]
    assert {name[:3] for name in everything} == {"__0", "__1", "__2", ".me"}
    assert results[1][1] == {}
    assert verify(path, deep=True).ok
    assert list_checkpoints(tmp_path)[0].world_size == 3
    for world_size in (2, 4):
        assert run_ranks(world_size, load_on_ranks, path, staged) == [[]] * world_size
    assert list(stages_directory().iterdir()) == []


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("staged", [False, True])
def test_damage_that_one_rank_meets_stops_all_before_any_has_changed(tmp_path, staged):
    path = tmp_path / "step_1"
    run_ranks(3, save_on_ranks, str(path), staged, False)
    harm(max(path.glob("__2_*.distcp"), key=lambda file: file.stat().st_size), "flip")
    failures = run_ranks(3, load_on_ranks, str(path), staged)
    assert all(failed for failed in failures)


def save_while_one_fails(path: str) -> list[int]:
    state = sharded(7)
    if dist.get_rank() == 1:
        state["own_1"] = Unpicklable()
    try:
        dcp_save(state, storage_writer=VolumeWriter(path))
    except CheckpointException as error:
        return sorted(error.failures)
    return []


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not me")


@pytest.mark.usefixtures("forkserver")
def test_a_rank_that_fails_fails_the_save_on_all_and_nothing_is_committed(tmp_path):
    assert run_ranks(2, save_while_one_fails, str(tmp_path / "step_1")) == [[1], [1]]
    assert find_latest_valid(tmp_path) is None


def save_to_own_directory(root: str) -> str:
    from air_nb.checkpoint import commit

    commit._LISTING_WAITS_S = (0.0, 0.0, 0.0, 0.0)
    try:
        dcp_save(sharded(7), storage_writer=VolumeWriter(f"{root}/node_{dist.get_rank()}/step_1"))
    except CheckpointException as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("forkserver")
def test_a_directory_that_is_not_shared_is_an_error_on_all_ranks(tmp_path):
    for message in run_ranks(2, save_to_own_directory, str(tmp_path)):
        assert "__1_0.distcp is missing" in message
        assert "not shared" in message
    assert find_latest_valid(tmp_path / "node_0") is None or not verify(tmp_path / "node_0" / "step_1").ok
