"""What is listed as valid, what is chosen, what may be deleted: without torch, on directories made by the protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from air_nb.checkpoint import commit, manifest
from air_nb.checkpoint import store as store_module
from air_nb.checkpoint.__main__ import main
from air_nb.checkpoint.catalog import (
    CheckpointInfo,
    CheckpointState,
    find_latest_valid,
    list_checkpoints,
    prune,
    verify,
)
from air_nb.checkpoint.manifest import COMMIT_FILE, MANIFEST_FILE, METADATA_FILE, WRITER_FILE, Manifest, record_of
from air_nb.checkpoint.store import open_store
from air_nb.data.fetch import Retries
from air_nb.errors import CheckpointDamagedError, CheckpointError

SHARDS = {"__0_0.distcp": b"a" * 1000, "__1_0.distcp": b"b" * 500, METADATA_FILE: b"m" * 100, "rank_0.state": b"s"}


def begin_and_write(root, step: int, shards=SHARDS) -> str:
    path = commit.begin(root, step)
    for name, content in shards.items():
        open_store(path).write(name, content)
    return path


def save(root, step: int, created_at: float | None = None, **more) -> str:
    path = begin_and_write(root, step)
    records = {name: record_of(content) for name, content in SHARDS.items()}
    at = time.time() if created_at is None else created_at
    commit.publish(open_store(path), Manifest(step=step, created_at=at, world_size=2, files=records, **more))
    return path


def newest(root) -> CheckpointInfo:
    found = find_latest_valid(root)
    assert found is not None
    return found


def save_foreign(path: Path) -> str:
    path.mkdir(parents=True)
    dcp_save({"w": torch.ones(3), "step": 1}, checkpoint_id=path, no_dist=True)
    return str(path)


def flip(path: str, position: int = -1) -> None:
    content = bytearray(Path(path).read_bytes())
    content[position] ^= 1
    Path(path).write_bytes(bytes(content))


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(params=["directory", "memory"])
def root(request, tmp_path) -> str:
    return str(tmp_path / "root") if request.param == "directory" else f"memory://{uuid.uuid4().hex}/root"


# ------------------------------------------------------------------------------------------------------- listing


def test_a_root_that_is_not_there_has_no_checkpoints(root):
    assert list_checkpoints(root) == []
    assert find_latest_valid(root) is None
    assert prune(root, 1) == []


def test_a_root_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    for look in (list_checkpoints, find_latest_valid, commit.sweep):
        with pytest.raises(CheckpointError, match="is a file"):
            look(tmp_path / "file")


def test_a_committed_checkpoint_is_listed_with_all_that_its_manifest_says(root):
    path = save(root, 12, run_id="r1", run_name="fine-tune")
    (info,) = list_checkpoints(root)
    assert (info.path, info.step, info.world_size, info.run_id, info.run_name) == (path, 12, 2, "r1", "fine-tune")
    assert info.state is CheckpointState.COMMITTED
    assert info.is_valid
    assert info.reason == ""
    assert info.size_bytes > 1600
    assert find_latest_valid(root) == info
    assert verify(path)
    assert verify(path, deep=True)


def test_the_newest_comes_first_then_the_highest_step(root):
    save(root, 9, created_at=1.0)
    save(root, 10, created_at=1.0)
    save(root, 10, created_at=2.0)
    save(root, 100, created_at=0.0)
    assert [(info.step, info.created_at) for info in list_checkpoints(root)] == [(10, 2), (10, 1), (9, 1), (100, 0)]


def test_other_directories_are_no_checkpoints(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.txt").write_text("")
    (tmp_path / "step_5").mkdir()  # not a name of ours, and empty
    (tmp_path / "file").write_text("")
    assert list_checkpoints(tmp_path) == []


def test_whatever_torch_saved_is_foreign_and_its_step_is_in_its_name(tmp_path):
    save_foreign(tmp_path / "epoch_2-step_1200")
    save(tmp_path, 1000)
    infos = list_checkpoints(tmp_path)
    assert [(info.step, info.state) for info in infos] == [(1000, "committed"), (1200, "foreign")]
    assert find_latest_valid(tmp_path) == infos[0]
    assert verify(infos[1].path)


@pytest.mark.parametrize("harm", ["truncate", "delete", "metadata"])
def test_a_foreign_checkpoint_that_lacks_bytes_is_damaged(tmp_path, harm):
    path = Path(save_foreign(tmp_path / "step_3"))
    shard = path / "__0_0.distcp"
    match harm:
        case "truncate":
            os.truncate(shard, shard.stat().st_size - 1)
        case "delete":
            shard.unlink()
        case _:
            os.truncate(path / METADATA_FILE, 50)
    (info,) = list_checkpoints(tmp_path)
    assert info.state is CheckpointState.DAMAGED
    assert find_latest_valid(tmp_path) is None


# -------------------------------------------------------------------------------------------------- crash and damage


def test_no_state_before_commit_counts_as_valid(root):
    """Every file of a save, one after the other, then a crash: the previous checkpoint is the newest valid one."""
    previous = save(root, 1)
    for written in range(len(SHARDS) + 1):
        begin_and_write(root, 2 + written, dict(list(SHARDS.items())[:written]))
    torn = open_store(begin_and_write(root, 99))
    torn.write(MANIFEST_FILE, b"{}")
    empty = open_store(begin_and_write(root, 100))
    empty.write(MANIFEST_FILE, b"{}")
    empty.write(COMMIT_FILE, b"")  # created without links, killed before it was filled
    infos = list_checkpoints(root)
    assert [info.state for info in infos] == ["incomplete"] * (len(SHARDS) + 3) + ["committed"]
    assert newest(root).path == previous
    assert not verify(torn.url) or METADATA_FILE in torn.list()


@pytest.mark.parametrize("name", [*SHARDS, MANIFEST_FILE, COMMIT_FILE])
@pytest.mark.parametrize("harm", ["truncate", "extend", "delete"])
def test_a_wrong_size_of_any_file_is_seen_without_reading_shards(tmp_path, name, harm):
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    file = Path(bad, name)
    match harm:
        case "truncate":
            os.truncate(file, file.stat().st_size - 1)
        case "extend":
            os.truncate(file, file.stat().st_size + 1)
        case _:
            file.unlink()
    assert newest(tmp_path).path == (good if _matters(name, harm) else bad)
    if name not in {COMMIT_FILE, MANIFEST_FILE}:
        assert name in list_checkpoints(tmp_path)[0].reason
        assert name in "".join(verify(bad).problems)


def _matters(name: str, harm: str) -> bool:
    return not (name == COMMIT_FILE and harm == "truncate")  # its last byte is a line feed


@pytest.mark.parametrize("name", SHARDS)
def test_a_flipped_byte_of_any_file_is_found_by_a_deep_look(tmp_path, name):
    path = save(tmp_path, 1)
    flip(f"{path}/{name}")
    assert verify(path).ok
    verdict = verify(path, deep=True)
    assert not verdict.ok
    assert len(verdict.problems) == 1
    assert name in verdict.problems[0]


@pytest.mark.parametrize("position", range(0, 900, 37))
def test_a_flipped_byte_of_the_manifest_is_found_by_any_look(tmp_path, position):
    path = save(tmp_path, 1)
    flip(f"{path}/{MANIFEST_FILE}", position % Path(path, MANIFEST_FILE).stat().st_size)
    assert not verify(path).ok
    assert find_latest_valid(tmp_path) is None


def test_a_flipped_byte_of_commit_never_raises_anything_unexpected(tmp_path):
    path = save(tmp_path, 1)
    content = Path(path, COMMIT_FILE).read_bytes()
    for position in range(len(content)):
        flip(f"{path}/{COMMIT_FILE}", position)
        list_checkpoints(tmp_path)
        verify(path, deep=True)
        Path(path, COMMIT_FILE).write_bytes(content)
    assert verify(path, deep=True).ok


def test_a_manifest_of_a_newer_air_nb_is_a_verdict_and_is_never_deleted(tmp_path):
    old = [save(tmp_path, step) for step in (1, 2, 3)]
    content = json.loads(Path(old[0], MANIFEST_FILE).read_bytes())
    content["format_version"] += 1
    newer = open_store(begin_and_write(tmp_path, 0))
    encoded = json.dumps(content).encode()
    newer.write(MANIFEST_FILE, encoded)
    record = {name: getattr(record_of(encoded), name) for name in ("size_bytes", "algorithm", "digest")}
    newer.create(COMMIT_FILE, json.dumps({"manifest": record}).encode())
    info = list_checkpoints(tmp_path)[0]
    assert info.state is CheckpointState.DAMAGED
    assert "update air_nb" in info.reason
    assert "update air_nb" in verify(newer.url).problems[0]
    assert prune(tmp_path, 2) == [old[0]]


def test_without_xxhash_its_checkpoints_are_listed_with_the_way_out_and_are_never_deleted(tmp_path, monkeypatch):
    pytest.importorskip("xxhash")
    old = save(tmp_path, 1)
    monkeypatch.setattr(manifest, "default_algorithm", lambda: "crc32")
    for step in (2, 3, 4):
        save(tmp_path, step)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    infos = list_checkpoints(tmp_path)
    assert [info.state for info in infos] == ["committed"] * 3 + ["damaged"]
    assert "pip install xxhash" in infos[-1].reason
    assert "pip install xxhash" in verify(old, deep=True).problems[0]
    assert len(prune(tmp_path, 2)) == 1
    assert Path(old).exists()


# ----------------------------------------------------------------------------------------------------------- commit


def test_two_that_commit_one_directory_are_told(root):
    path = begin_and_write(root, 1)
    empty = Manifest(step=1, created_at=0.0, world_size=1, files={})
    commit.publish(open_store(path), empty)
    with pytest.raises(FileExistsError):
        commit.publish(open_store(path), empty)


def test_a_commit_whose_answer_was_lost_is_found_to_be_there(root, monkeypatch):
    path = begin_and_write(root, 1)
    kind = type(open_store(path))
    original = kind.create

    def create(store, name, data):
        original(store, name, data)
        raise TimeoutError("the answer was lost")

    monkeypatch.setattr(kind, "create", create)
    monkeypatch.setattr(kind, "is_remote", True)
    monkeypatch.setattr(store_module, "_RETRIES", Retries(attempts=3, first_wait_s=0.001))
    commit.publish(open_store(path), Manifest(step=1, created_at=0.0, world_size=1, files={}))
    assert verify(path).ok


def test_files_that_only_another_machine_sees_are_not_committed(root, monkeypatch):
    monkeypatch.setattr(commit, "_LISTING_WAITS_S", (0.0, 0.0))
    path = begin_and_write(root, 1)
    records = {name: record_of(content) for name, content in SHARDS.items()} | {"__2_0.distcp": record_of(b"elsewhere")}
    with pytest.raises(CheckpointError) as caught:
        commit.publish(open_store(path), Manifest(step=1, created_at=0.0, world_size=3, files=records))
    assert "__2_0.distcp is missing" in str(caught.value)
    assert "not shared" in str(caught.value)
    assert find_latest_valid(root) is None


def test_a_directory_is_never_used_twice(root):
    paths = {commit.begin(root, 5) for _ in range(20)}
    assert len(paths) == 20
    assert {commit.step_of(path.rpartition("/")[2]) for path in paths} == {5}


@pytest.mark.parametrize(
    "name", ["step_5", "step_5.1234567", "step_x.12345678", "step_5.12345678.old", "astep_5.12345678"]
)
def test_names_that_are_not_ours_tell_no_step(name):
    assert commit.step_of(name) is None


def test_an_interrupted_removal_leaves_what_never_counts(root, monkeypatch):
    path = save(root, 1)
    store = open_store(path)
    deleted: list[str] = []
    monkeypatch.setattr(type(store), "delete", lambda _, name="": deleted.append(name))
    commit.remove(store)
    assert deleted == [COMMIT_FILE, ""]


# ------------------------------------------------------------------------------------------------- sweep and retention


def begun_by_another_process(root, step: int, *, wait: bool) -> tuple[str, subprocess.Popen[str]]:
    """A directory begun by a process that has died at once, or that waits for the end of its stdin."""
    program = f"from air_nb.checkpoint.commit import begin; print(begin({str(root)!r}, {step}), flush=True)"
    program += "\nimport sys; sys.stdin.read()" if wait else ""
    process = subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    if not wait:
        process.communicate()
    return path, process


def test_a_dead_writer_is_swept_at_once_and_a_living_one_never(tmp_path):
    committed = save(tmp_path, 1)
    dead, _ = begun_by_another_process(tmp_path, 2, wait=False)
    living, process = begun_by_another_process(tmp_path, 3, wait=True)
    try:
        Path(living, WRITER_FILE).touch()
        os.utime(Path(living, WRITER_FILE), (0, 0))
        assert commit.sweep(tmp_path) == (Path(dead).name,)
        assert prune(tmp_path, 2, grace_s=0) == []
        assert {info.path for info in list_checkpoints(tmp_path)} == {committed, living}
    finally:
        process.communicate()
    assert commit.sweep(tmp_path) == (Path(living).name,)


def test_a_writer_elsewhere_is_given_the_grace_period(tmp_path):
    path = begin_and_write(tmp_path, 1)
    writer = json.loads(Path(path, WRITER_FILE).read_bytes())
    Path(path, WRITER_FILE).write_text(json.dumps({**writer, "host": "elsewhere"}))
    assert commit.sweep(tmp_path, grace_s=600) == ()
    for file in Path(path).iterdir():
        os.utime(file, (time.time() - 700,) * 2)
    Path(path, "__1_0.distcp").touch()  # one file has changed lately: somebody still writes
    assert commit.sweep(tmp_path, grace_s=600) == ()
    os.utime(Path(path, "__1_0.distcp"), (time.time() - 700,) * 2)
    assert commit.sweep(tmp_path, grace_s=600) == (Path(path).name,)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"pid": 1}'])
def test_a_torn_writer_file_means_the_grace_period(tmp_path, content):
    path = begin_and_write(tmp_path, 1)
    Path(path, WRITER_FILE).write_bytes(content)
    assert commit.sweep(tmp_path, grace_s=600) == ()
    assert commit.sweep(tmp_path, grace_s=0) == (Path(path).name,)


def test_an_empty_directory_of_ours_is_no_checkpoint_and_goes_after_the_grace_period(tmp_path):
    (tmp_path / "step_1.00000000").mkdir()
    assert list_checkpoints(tmp_path) == []
    commit.sweep(tmp_path, grace_s=600)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1.00000000"]
    os.utime(tmp_path / "step_1.00000000", (0, 0))
    commit.sweep(tmp_path, grace_s=600)
    assert list(tmp_path.iterdir()) == []


def test_sweeping_touches_no_directory_of_others(tmp_path):
    (tmp_path / "step_1").mkdir()
    (tmp_path / "data").mkdir()
    save_foreign(tmp_path / "step_7")
    assert commit.sweep(tmp_path, grace_s=0) == ()
    assert prune(tmp_path, 0, grace_s=0) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "step_1", "step_7"]


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 10])
def test_the_newest_are_kept_and_never_fewer_than_two(root, keep):
    paths = [save(root, step) for step in range(5)]
    kept = min(5, max(keep, 2))
    doomed = paths[::-1][kept:]
    assert prune(root, keep, dry_run=True) == doomed
    assert len(list_checkpoints(root)) == 5
    assert prune(root, keep) == doomed
    assert [info.path for info in list_checkpoints(root)] == paths[::-1][:kept]
    assert prune(root, keep) == []


def test_damaged_ones_do_not_count_as_kept_and_go_when_enough_good_ones_are_newer(tmp_path):
    paths = [save(tmp_path, step) for step in range(6)]
    for step in (1, 4):
        os.truncate(Path(paths[step], "__0_0.distcp"), 3)
    # Good ones are 5, 3, 2, 0: two stay. 4 is damaged, but newer than the second good one.
    assert prune(tmp_path, 2) == [paths[2], paths[1], paths[0]]
    assert [info.step for info in list_checkpoints(tmp_path)] == [5, 4, 3]


def test_a_negative_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep=-1"):
        prune(tmp_path, -1)


def test_reading_a_manifest_that_is_gone_says_so(tmp_path):
    path = save(tmp_path, 1)
    Path(path, MANIFEST_FILE).unlink()
    with pytest.raises(CheckpointDamagedError, match=r"manifest\.json is missing"):
        commit.read_manifest(open_store(path))


# ----------------------------------------------------------------------------------------------------- command line


def test_the_command_line_lists_verifies_and_prunes(tmp_path, capsys):
    paths = [save(tmp_path, step, run_name="fine-tune") for step in (1, 2, 3)]
    assert main(["ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["step", "state"]
    assert [line.split()[0] for line in lines[1:]] == ["3", "2", "1"]
    assert "fine-tune" in lines[1]
    assert main(["verify", "--deep", str(tmp_path)]) == 0
    flip(f"{paths[0]}/__0_0.distcp")
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["verify", "--deep", paths[0]]) == 1
    assert "__0_0.distcp is not what was written" in capsys.readouterr().out
    assert main(["prune", str(tmp_path), "--keep", "2", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would delete {paths[0]}\n"
    assert main(["prune", str(tmp_path), "--keep", "2"]) == 0
    assert len(list_checkpoints(tmp_path)) == 2


def test_the_command_line_shows_the_newest_checkpoint(tmp_path, capsys):
    save_foreign(tmp_path / "step_7")
    assert main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "no manifest" in shown
    assert [line.split() for line in shown.splitlines()[-2:]] == [
        ["step", "object", "-", "1"],
        ["w", "float32", "3", "1"],
    ]


def test_the_command_line_says_what_is_wrong_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["ls", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith("CheckpointError: ")
    assert main(["ls", str(tmp_path)]) == 1
    assert main(["show", str(tmp_path)]) == 2
    assert main(["verify", str(tmp_path)]) == 1
