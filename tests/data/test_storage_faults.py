"""Disks that are full, uploads that break, processes that are killed: a save says so, and publishes nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from air_nb.checkpoint import VolumeReader, VolumeWriter, find_latest_valid, list_checkpoints, verify
from air_nb.checkpoint import store as store_module
from air_nb.checkpoint.manifest import METADATA_FILE
from air_nb.checkpoint.stage import Stage, stages_directory
from air_nb.checkpoint.store import DirectoryStore, open_store
from air_nb.data.fetch import Retries
from tests.support.wait import eventually

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MIB = 2**20


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def make_state(seed: int = 1, tensors: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"t{number}": torch.randn(MIB // 4, generator=generator) for number in range(tensors)}


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A tmpfs of 3 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)  # also if a failed test still holds a file of it


def with_space_for_metadata(writer_class: type, filler: Path):
    """A writer on a disk where another job frees some space just before ``.metadata`` is written."""

    class Writer(writer_class):  # type: ignore[misc] # either class
        def finish(self, metadata, results) -> None:
            filler.unlink(missing_ok=True)
            super().finish(metadata, results)

    return Writer


# ----------------------------------------------------------------------------------------------------------- full disks


class OthersFirst(DefaultSavePlanner):
    """Lets the other threads have the disk first; another job frees some space before the waiting thread writes."""

    def __init__(self, filler: Path) -> None:
        super().__init__()
        self.filler = filler
        self.threads = threading.active_count()

    def resolve_data(self, write_item):
        if threading.current_thread() is threading.main_thread():
            assert eventually(lambda: threading.active_count() == self.threads, 30)
            self.filler.unlink(missing_ok=True)
        return super().resolve_data(write_item)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_torch_s_own_writer_publishes_what_did_not_fit_on_the_disk(small_disk):
    """Why errors of threads are kept. If this fails, torch has learnt to raise them, and so much the better."""
    filler = small_disk / "filler"
    filler.write_bytes(bytes(3 * MIB // 2))
    writer = with_space_for_metadata(FileSystemWriter, filler)(small_disk / "s", thread_count=4)
    dcp_save(make_state(), storage_writer=writer, planner=OthersFirst(filler))
    assert (small_disk / "s" / METADATA_FILE).exists()
    with pytest.raises(CheckpointException):
        dcp_load(make_state(2), storage_reader=FileSystemReader(small_disk / "s"))


def test_our_writer_does_not(small_disk):
    filler = small_disk / "filler"
    filler.write_bytes(bytes(3 * MIB // 2))
    writer = with_space_for_metadata(VolumeWriter, filler)(small_disk / "step_1", thread_count=4)
    with pytest.raises(CheckpointException, match="No space left on device"):
        dcp_save(make_state(), storage_writer=writer, planner=OthersFirst(filler))
    assert METADATA_FILE not in names(small_disk / "step_1")


@pytest.mark.parametrize("thread_count", [1, 2, 4])
def test_a_full_disk_fails_the_save_whichever_thread_meets_it(small_disk, thread_count):
    filler = small_disk / "filler"
    filler.write_bytes(bytes(64 * 1024))
    writer = with_space_for_metadata(VolumeWriter, filler)(small_disk / "step_2", thread_count=thread_count)
    with pytest.raises(CheckpointException) as caught:
        dcp_save(make_state(), storage_writer=writer)
    assert "No space left on device" in str(caught.value)
    assert "was not published" in str(caught.value)
    assert METADATA_FILE not in names(small_disk / "step_2")
    assert filler.exists()
    assert find_latest_valid(small_disk) is None


def test_a_full_disk_leaves_the_checkpoint_before_intact(small_disk):
    dcp_save(make_state(1, tensors=2), storage_writer=VolumeWriter(small_disk / "step_1"))
    with pytest.raises(CheckpointException):
        dcp_save(make_state(2, tensors=2), storage_writer=VolumeWriter(small_disk / "step_2"))
    assert [info.step for info in list_checkpoints(small_disk) if info.is_valid] == [1]
    assert verify(small_disk / "step_1", deep=True).ok


def test_a_full_stage_is_said_to_be_one_and_is_emptied(small_disk, tmp_path, monkeypatch):
    monkeypatch.setattr(DirectoryStore, "is_remote", True)
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    with pytest.raises(CheckpointException) as caught:
        dcp_save({"big": torch.zeros(2 * MIB)}, storage_writer=VolumeWriter(tmp_path / "step_1"))
    assert "No space left on device" in str(caught.value)
    assert "TMPDIR" in str(caught.value)
    assert list(stages_directory().iterdir()) == []


def test_a_stage_needs_room_only_for_what_is_on_its_way(small_disk, tmp_path, monkeypatch):
    monkeypatch.setattr(DirectoryStore, "is_remote", True)
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    writer = VolumeWriter(tmp_path / "step_1", single_file_per_rank=False, thread_count=2)
    dcp_save(make_state(1, tensors=7), storage_writer=writer)
    assert verify(tmp_path / "step_1", deep=True).ok


# ------------------------------------------------------------------------------------------------------- broken uploads


@pytest.fixture
def mount(tmp_path, monkeypatch):
    """A directory that is taken for a mount, with little patience."""
    monkeypatch.setattr(DirectoryStore, "is_remote", True)
    monkeypatch.setattr(store_module, "_RETRIES", Retries(attempts=3, first_wait_s=0.001, longest_wait_s=0.001))
    return tmp_path / "step_1"


def failing_sync(monkeypatch, number: int, times: int) -> list[int]:
    """Every fsync of a file fails, so often."""
    calls: list[int] = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return calls


def test_an_upload_that_fails_in_passing_is_repeated(mount, monkeypatch):
    failing_sync(monkeypatch, errno.EIO, 2)
    dcp_save(make_state(3, tensors=1), storage_writer=VolumeWriter(mount))
    assert verify(mount, deep=True).ok


def test_an_upload_that_keeps_failing_fails_the_save(mount, monkeypatch):
    failing_sync(monkeypatch, errno.EIO, 1000)
    with pytest.raises(CheckpointException, match="Input/output error"):
        dcp_save(make_state(3, tensors=1), storage_writer=VolumeWriter(mount))
    assert METADATA_FILE not in names(mount)
    assert list(stages_directory().iterdir()) == []


def test_a_full_target_is_not_tried_again(mount, monkeypatch):
    calls = failing_sync(monkeypatch, errno.ENOSPC, 1000)
    with pytest.raises(CheckpointException, match="No space left"):
        dcp_save(make_state(3, tensors=1), storage_writer=VolumeWriter(mount))
    assert len(calls) == 1


def test_an_upload_that_loses_bytes_without_an_error_is_noticed(mount, monkeypatch):
    original = DirectoryStore.upload

    def lossy(store, name, local_path) -> None:
        original(store, name, local_path)
        os.truncate(store.path / name, 1000)

    monkeypatch.setattr(DirectoryStore, "upload", lossy)
    with pytest.raises(CheckpointException, match="1000 have arrived"):
        dcp_save(make_state(3, tensors=1), storage_writer=VolumeWriter(mount))
    assert find_latest_valid(mount.parent) is None


def test_a_shard_that_is_lost_before_the_commit_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("air_nb.checkpoint.commit._LISTING_WAITS_S", (0.0,))

    class Losing(VolumeWriter):
        def finish(self, metadata, results) -> None:
            (tmp_path / "step_1" / "__0_0.distcp").unlink()
            super().finish(metadata, results)

    with pytest.raises(CheckpointException, match=r"__0_0\.distcp is missing"):
        dcp_save(make_state(3, tensors=1), storage_writer=Losing(tmp_path / "step_1"))
    assert find_latest_valid(tmp_path) is None


# ------------------------------------------------------------------------------------------------------ other culprits


class BrokenPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if write_item.index.fqn == "t2":
            raise ZeroDivisionError("in the planner")
        return super().resolve_data(write_item)


@pytest.mark.parametrize("thread_count", [1, 3])
def test_an_error_of_the_planner_keeps_its_type(tmp_path, thread_count):
    writer = VolumeWriter(tmp_path / "step_1", thread_count=thread_count)
    with pytest.raises(CheckpointException) as caught:
        dcp_save(make_state(), storage_writer=writer, planner=BrokenPlanner())
    assert isinstance(caught.value.failures[0][0], ZeroDivisionError)
    assert METADATA_FILE not in names(tmp_path / "step_1")
    # The writer is as good as new.
    dcp_save(make_state(), checkpoint_id=tmp_path / "step_2", storage_writer=writer)
    assert verify(tmp_path / "step_2", deep=True).ok


def test_a_root_that_can_not_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointException, match="file"):
        dcp_save(make_state(), storage_writer=VolumeWriter(tmp_path / "file" / "step_1"))


def test_a_save_killed_while_it_overwrites_leaves_no_mixture(tmp_path):
    """The old ``.metadata`` with new shards would load, and be neither the old state nor the new one."""
    path = tmp_path / "step_1"
    dcp_save(make_state(1), storage_writer=VolumeWriter(path))
    program = f"""
import os, signal, torch, torch.distributed.checkpoint as dcp
from air_nb.checkpoint import VolumeWriter
class Killed(VolumeWriter):
    def finish(self, metadata, results):
        os.kill(os.getpid(), signal.SIGKILL)
dcp.save({{f"t{{n}}": torch.zeros({MIB // 4}) for n in range(4)}}, storage_writer=Killed({str(path)!r}), no_dist=True)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    assert find_latest_valid(tmp_path) is None
    with pytest.raises(CheckpointException, match="no checkpoint in"):
        dcp_load(make_state(2), storage_reader=VolumeReader(path))
    dcp_save(make_state(3), storage_writer=VolumeWriter(path))
    assert verify(path, deep=True).ok


def test_the_stage_of_a_killed_process_is_swept_by_the_next_one(tmp_path):
    program = """
import os, signal
from air_nb.checkpoint.stage import Stage
stages = Stage(), Stage("shared")
for stage in stages:
    (stage.path / "shard").write_bytes(bytes(1000))
print(len(os.listdir(stage.path.parent)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, env=environment)
    assert (done.stdout, done.returncode) == ("2\n", -signal.SIGKILL)
    assert len(list(stages_directory().iterdir())) == 2
    stage = Stage()
    assert list(stages_directory().iterdir()) == [stage.path]
    stage.close()
    assert list(stages_directory().iterdir()) == []


def test_a_shared_stage_lasts_as_long_as_its_last_user():
    first, second, own = Stage("key"), Stage("key"), Stage()
    (first.path / "file").write_text("x")
    first.close()
    first.close()
    own.close()
    assert (second.path / "file").read_text() == "x"
    second.close()
    assert list(stages_directory().iterdir()) == []


def test_a_forked_child_does_not_keep_a_stage():
    stage = Stage()
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - the child
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        stage.close()
        assert list(stages_directory().iterdir()) == []
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        for descriptor in (*ready, *done):
            os.close(descriptor)


def test_ranks_of_one_machine_fetch_a_file_once(tmp_path, monkeypatch):
    monkeypatch.setattr(DirectoryStore, "is_remote", True)
    state = make_state(5)
    dcp_save(state, storage_writer=VolumeWriter(tmp_path / "step_1", thread_count=2))
    read: list[str] = []
    original = DirectoryStore.blocks

    def blocks(store, name):
        read.append(name)
        return original(store, name)

    monkeypatch.setattr(DirectoryStore, "blocks", blocks)
    stage = Stage("read-" + _key_of(tmp_path / "step_1"))  # another rank that is still at it
    try:
        for _ in range(3):
            loaded = make_state(9)
            dcp_load(loaded, storage_reader=VolumeReader(tmp_path / "step_1"))
            assert all(torch.equal(loaded[key], state[key]) for key in state)
    finally:
        stage.close()
    assert sorted(read) == ["__0_0.distcp", "__0_1.distcp"]


def _key_of(path: Path) -> str:
    reader = VolumeReader(path)
    reader.read_metadata()
    return reader._key


def test_a_checkpoint_of_many_files_is_listed_as_what_it_is(tmp_path):
    url = f"memory://{uuid.uuid4().hex}/root"
    state = {f"t{number}": torch.ones(2) for number in range(60)}
    dcp_save(state, storage_writer=VolumeWriter(f"{url}/step_1", single_file_per_rank=False))
    assert len(open_store(f"{url}/step_1").list()) == 63
    assert [info.state for info in list_checkpoints(url)] == ["committed"]
