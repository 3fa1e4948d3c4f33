"""Crashes, damage, full disks, dead ranks, second managers: what was saved before is there, and an error says why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from air_nb.checkpoint import CheckpointManager, find_latest_valid, list_checkpoints, saving
from air_nb.checkpoint.manifest import record_of
from air_nb.checkpoint.storage import VolumeWriter
from air_nb.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from tests.support.ranks import RanksFailedError, run_ranks
from tests.support.trainings import flip, full_state, kill_this_process, only_checkpoint

PROGRAMS = Path(__file__).parents[1] / "faults" / "programs"


class Training:
    """A model and an optimizer that are those of a step."""

    def __init__(self, step, width=3):
        torch.manual_seed(step)
        self.model = nn.Linear(4, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 + step)
        self.model(torch.randn(2, 4)).sum().backward()
        self.optimizer.step()

    @property
    def state(self):
        return full_state(self.model, self.optimizer)

    def manager(self, root, **options):
        return CheckpointManager(root, model=self.model, optimizer=self.optimizer, **options)


def save(root, *steps):
    for step in steps:
        with Training(step).manager(root, asynchronous=False) as manager:
            manager.save(step)


def restore(root, **options):
    """Step, whether the state is that of the step, and events."""
    training = Training(99)
    events: list[Any] = []
    with training.manager(root, on_event=events.append, **options) as manager:
        step = manager.restore()
    return step, step is not None and training.state == Training(step).state, events


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


# ---------------------------------------------------------------------------------------------------------- crashes


@pytest.fixture(scope="module")
def crash_at(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("shim") / "crash_at.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, PROGRAMS / "crash_at.c"], check=True)
    return library


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_crash_at_any_io_call_of_a_save_leaves_the_last_committed_checkpoint(crash_at, tmp_path, mode):
    environment = os.environ | {"LD_PRELOAD": str(crash_at), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, PROGRAMS / "crash_in_save.py", tmp_path, mode],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    *crashes, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(crashes) > 40
    assert last["code"] == 0
    for crash in crashes:
        assert crash["code"] == 77
        assert crash["same"], crash
        assert crash["step"] == (3 if crash["committed"] else 2), crash
        assert crash["left"]["4"] == "committed", crash
        assert "damaged" not in crash["left"].values(), crash
    assert {crash["committed"] for crash in crashes} == {True, False}


# ----------------------------------------------------------------------------------------------------------- damage

FILES = ["COMMIT", "manifest.json", ".metadata", "rank_0.state", "__0_0.distcp"]


def truncate(path, size_bytes):
    with path.open("r+b") as file:
        file.truncate(size_bytes)


DAMAGES = {
    "first bit": lambda path: flip(path, 0.0),
    "a bit at a third": lambda path: flip(path, 1 / 3),
    "a bit at two thirds": lambda path: flip(path, 2 / 3),
    "last bit": lambda path: flip(path, 1.0),
    "half": lambda path: truncate(path, path.stat().st_size // 2),
    "last byte": lambda path: truncate(path, path.stat().st_size - 1),
    "empty": lambda path: truncate(path, 0),
    "deleted": Path.unlink,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_is_found_and_the_checkpoint_before_it_restored_and_reported(root, name, damage):
    save(root, 1, 2)
    DAMAGES[damage](only_checkpoint(root, 2) / name)
    step, is_same, events = restore(root)
    is_harmless = name == "COMMIT" and damage in {"last bit", "last byte"}  # the newline after the JSON
    if is_harmless and step == 2:
        assert is_same
        return
    assert (step, is_same) == (1, True)
    rejected, restored = events
    assert (str(rejected.kind), rejected.step) == ("rejected", 2)
    assert (str(restored.kind), restored.step) == ("restored", 1)


@pytest.mark.parametrize("name", [name for name in FILES if name != "COMMIT"])
@pytest.mark.parametrize("damage", ["a bit at a third", "half", "deleted"])
def test_if_all_are_damaged_that_is_an_error_with_all_reasons_and_nothing_is_touched(root, name, damage):
    save(root, 1, 2)
    for step in (1, 2):
        DAMAGES[damage](only_checkpoint(root, step) / name)
    training = Training(99)
    before = training.state
    with pytest.raises(CheckpointDamagedError) as caught:
        training.manager(root).restore()
    assert training.state == before
    for step in (1, 2):
        assert only_checkpoint(root, step).name in str(caught.value)
    assert str(caught.value).count(name) >= 2


def test_what_was_never_committed_is_said_when_training_starts_afresh(root, caplog):
    save(root, 1)
    (only_checkpoint(root, 1) / "COMMIT").unlink()
    assert restore(root)[0] is None
    assert f"{only_checkpoint(root, 1)} was never committed" in caplog.text


def test_an_unreadable_file_counts_as_damaged(root, monkeypatch):
    save(root, 1, 2)
    path = only_checkpoint(root, 2) / "rank_0.state"
    path.unlink()
    path.mkdir()  # even root can't read that as a file
    assert restore(root)[:2] == (1, True)


def test_stock_torch_loads_a_flipped_bit_silently(root):
    """What the digests are for."""
    save(root, 1)
    shard = only_checkpoint(root, 1) / "__0_0.distcp"
    weight = Training(1).model.weight.detach()
    content = shard.read_bytes()
    at = content.index(weight.numpy().tobytes())
    shard.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    loaded = {"model": nn.Linear(4, 3).state_dict()}
    dcp_load(loaded, checkpoint_id=only_checkpoint(root, 1))
    assert not torch.equal(loaded["model"]["weight"], weight)
    with pytest.raises(CheckpointDamagedError):
        restore(root)


def restored_on_rank(root):
    training, rejected = Training(99), []

    def note(event):
        rejected.append((str(event.kind), event.message))

    with training.manager(root, on_event=note) as manager:
        return manager.restore(), training.state, rejected


def save_on_ranks(root, *steps):
    for step in steps:
        with Training(step).manager(root) as manager:
            manager.save(step)


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("name", ["rank_1.state", "__1_0.distcp"])
def test_damage_that_one_rank_sees_makes_all_fall_back(root, name):
    run_ranks(2, save_on_ranks, str(root), 1, 2)
    flip(only_checkpoint(root, 2) / name)
    first, second = run_ranks(2, restored_on_rank, str(root))
    assert first[:2] == second[:2] == (1, Training(1).state)
    assert first[2][0][0] == "rejected"
    assert name in first[2][0][1]


def test_a_newer_format_is_no_damage_and_not_passed_over(root):
    save(root, 1, 2)
    path = only_checkpoint(root, 2)
    manifest = json.loads((path / "manifest.json").read_text())

    content = json.dumps({**manifest, "format_version": 99}).encode()
    (path / "manifest.json").write_bytes(content)
    record = record_of(content)
    commit = {"size_bytes": record.size_bytes, "algorithm": record.algorithm, "digest": record.digest}
    (path / "COMMIT").write_text(json.dumps({"manifest": commit}))
    with pytest.raises(CheckpointMismatchError, match="format version 99"):
        restore(root)


def test_another_model_is_no_damage_and_not_passed_over(root):
    save(root, 1)
    other = Training(99, width=5)
    before = other.state
    with pytest.raises(CheckpointMismatchError) as caught:
        other.manager(root).restore()
    assert "model.weight is float32 [3, 4] there, float32 [5, 4] here" in str(caught.value)
    assert "model.bias" in str(caught.value)
    assert other.state == before


# ------------------------------------------------------------------------------------------------------- full disks


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A tmpfs of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_an_error_and_the_checkpoint_before_it_stays(small_disk, asynchronous):
    model = nn.Linear(512, 1024)  # 2 MiB
    events: list[Any] = []
    manager = CheckpointManager(small_disk, model=model, asynchronous=asynchronous, on_event=events.append)
    manager.save(1)
    manager.wait()

    def save_2():
        manager.save(2)
        manager.wait()

    with pytest.raises(CheckpointError, match="No space left") as caught:
        save_2()
    assert "what was saved before is as it was" in "".join(caught.value.__notes__)
    assert [str(event.kind) for event in events] == ["saved", "save failed"]
    assert [info.step for info in list_checkpoints(small_disk)] == [1]
    (found,) = small_disk.iterdir()
    (found / "__0_0.distcp").unlink()  # makes room
    manager.save(3)
    manager.wait()
    latest = find_latest_valid(small_disk)
    assert latest is not None
    assert latest.step == 3
    manager.close()


def test_a_save_that_failed_in_its_thread_is_raised_by_the_next_call(root, monkeypatch):
    training = Training(1)
    manager = training.manager(root)
    with monkeypatch.context() as patch:
        patch.setattr(VolumeWriter, "write_data", lambda *_: (_ for _ in ()).throw(OSError(5, "the disk is on fire")))
        manager.save(1)
        for thread in threading.enumerate():
            if thread.name == "air_nb-checkpoint":
                thread.join()
    with pytest.raises(CheckpointError, match="the disk is on fire"):
        manager.save(2)
    manager.save(2)
    manager.close()
    assert [info.step for info in list_checkpoints(root)] == [2]


def loop_with_a_failing_save(root):
    from tests.support.trainings import Training as Loop
    from tests.support.trainings import train

    if dist.get_rank() == 1:
        VolumeWriter.write_data = lambda *_: (_ for _ in ()).throw(OSError(5, "the disk is on fire"))  # type: ignore[method-assign]
    seen = []

    def note(step, manager):
        seen.append(step)
        time.sleep(0.05)

    try:
        train(Loop(root, "ddp", every=2), note)
    except CheckpointError as error:
        return str(error), seen
    return None


@pytest.mark.usefixtures("forkserver")
def test_a_save_that_failed_ends_the_loop_on_all_ranks_at_the_same_step(root):
    first, second = run_ranks(2, loop_with_a_failing_save, str(root))
    assert first == second
    assert "on rank 1" in first[0]
    assert "the disk is on fire" in first[0]
    assert list_checkpoints(root) == []


# ------------------------------------------------------------------------------------------- dead ranks and others


def killed_in_the_save(root, phase):
    with Training(1).manager(root) as manager:
        manager.save(1)
    if dist.get_rank() == 1:
        if phase == "shards":
            VolumeWriter.write_data = lambda *_: kill_this_process()  # type: ignore[method-assign,assignment]
        else:
            saving.encode = lambda *_: kill_this_process()  # type: ignore[assignment,attr-defined]
    Training(2).manager(root, timeout_s=20).save(2, wait=True)


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("phase,name", [("shards", "write its shards"), ("files", "write the files of the ranks")])
def test_a_rank_that_is_killed_in_the_save_is_an_error_on_the_others(root, phase, name):
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, killed_in_the_save, str(root), phase)
    assert "exit code -9" in caught.value.tracebacks[1]
    assert f"could not {name}" in caught.value.tracebacks[0]
    assert [info.step for info in list_checkpoints(root) if info.is_valid] == [1]
    assert restore(root)[:2] == (1, True)


def test_two_managers_on_one_root_are_told_and_all_checkpoints_stay(root):
    first, second = Training(1).manager(root), Training(2).manager(root)
    first.save(1, wait=True)
    second.save(2, wait=True)
    with pytest.raises(CheckpointError, match="another checkpoint manager saves to") as caught:
        first.save(3, wait=True)
    assert only_checkpoint(root, 2).name in str(caught.value)
    assert {info.step for info in list_checkpoints(root)} == {1, 2}
    first.close()
    second.save(4, wait=True)
    second.close()
    assert restore(root)[0] == 4


def test_a_manager_may_follow_another_one_in_the_same_process(root):
    save(root, 1, 2)
    assert restore(root)[0] == 2
    save(root, 3)


def on_its_own_machine(directory):
    """As where every machine has a directory of that name."""
    saving._SEEN_WITHIN_S = 0.3
    manager = Training(1).manager(Path(directory) / f"machine_{dist.get_rank()}")
    try:
        manager.save(1, wait=True)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.usefixtures("forkserver")
def test_a_root_that_is_not_shared_is_an_error_that_says_so(tmp_path):
    for message in run_ranks(2, on_its_own_machine, str(tmp_path)):
        assert "on rank 1" in message
        assert "do not share this directory" in message
    assert not any(list_checkpoints(path) for path in tmp_path.iterdir())
