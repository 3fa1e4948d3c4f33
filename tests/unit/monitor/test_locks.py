import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from air_nb.errors import DeviceError
from air_nb.monitor.locks import GpuLocks, Taken, default_lock_directory

ROOT = Path(__file__).parents[3]

HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from air_nb.monitor.locks import GpuLocks
held = GpuLocks(Path(sys.argv[2])).acquire(["GPU-1", "GPU-2"], "run swift-otter")
"""


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "locks"


@pytest.fixture
def locks(directory):
    return GpuLocks(directory)


@pytest.fixture
def start_holder(directory):
    """Another process that holds GPU-1 and GPU-2 until it is killed."""
    holders: list[subprocess.Popen[str]] = []

    def start(more="print('held', flush=True)"):
        program = f"{HOLDER}\n{more}\ntime.sleep(3600)"
        command = [sys.executable, "-c", program, str(ROOT), str(directory)]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        holders.append(holder)
        assert holder.stdout is not None
        return holder, holder.stdout.readline().strip()

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()


def test_a_gpu_is_held_once_even_within_one_process(locks):
    with locks.acquire(["GPU-1"], "run a"):
        with pytest.raises(Taken) as taken:
            locks.acquire(["GPU-1"], "run b")
        assert (taken.value.uuid, taken.value.owner) == ("GPU-1", "run a")
        assert locks.held_uuids() == {"GPU-1": "run a"}
    assert locks.held_uuids() == {}
    locks.acquire(["GPU-1"], "run b").close()


def test_all_or_none(locks):
    with locks.acquire(["GPU-2"], "run a"):
        with pytest.raises(Taken):
            locks.acquire(["GPU-1", "GPU-2", "GPU-3"], "run b")
        assert set(locks.held_uuids()) == {"GPU-2"}
        with locks.acquire(["GPU-1", "GPU-3"], "run c") as held:
            assert sorted(held.uuids) == ["GPU-1", "GPU-3"]


def test_another_process_holds_until_it_is_killed(locks, start_holder):
    holder, _ = start_holder()
    assert locks.held_uuids() == {"GPU-1": "run swift-otter", "GPU-2": "run swift-otter"}
    with pytest.raises(Taken, match="GPU GPU-2 is taken by run swift-otter"):
        locks.acquire(["GPU-2"], "run b")
    holder.kill()
    holder.wait()
    assert locks.held_uuids() == {}
    locks.acquire(["GPU-1", "GPU-2"], "run b").close()


def test_a_forked_child_does_not_keep_the_locks_of_a_killed_kernel(locks, start_holder):
    fork = "import os\nif not os.fork(): print(os.getpid(), flush=True)"
    holder, child = start_holder(fork)
    try:
        holder.kill()
        holder.wait()
        assert locks.held_uuids() == {}
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_forked_child_that_closes_them_leaves_the_parents_locks_alone(locks, start_holder):
    fork = """
import os
child = os.fork()
if not child: held.close(); os._exit(0)
print(os.waitpid(child, 0)[1], flush=True)
"""
    _, status = start_holder(fork)
    assert status == "0"
    assert set(locks.held_uuids()) == {"GPU-1", "GPU-2"}


def test_closing_lets_go_though_a_child_forked_past_python_has_the_descriptor(locks):
    held = locks.acquire(["GPU-1"], "run a")
    copy = os.dup(held._descriptors["GPU-1"])  # what such a child has: the same open file
    try:
        held.close()
        assert locks.held_uuids() == {}
    finally:
        os.close(copy)


def test_looking_at_the_locks_never_makes_one_look_taken(locks):
    locks.acquire(["GPU-1"], "run a").close()
    stop = threading.Event()

    def look():
        while not stop.is_set():
            locks.held_uuids()

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(300):
            locks.acquire(["GPU-1"], "run b").close()
    finally:
        stop.set()
        for looker in lookers:
            looker.join()


def test_the_owner_is_one_short_line(locks):
    with locks.acquire(["GPU-1"], "run a\n" + "x" * 10_000):
        owner = locks.held_uuids()["GPU-1"]
    assert owner.startswith("run a xxx")
    assert len(owner) == 500


def test_a_shorter_owner_replaces_a_longer_one(locks):
    locks.acquire(["GPU-1"], "a long text").close()
    with locks.acquire(["GPU-1"], "run b"):
        assert locks.held_uuids() == {"GPU-1": "run b"}


def test_descriptors_do_not_reach_programs_that_the_kernel_starts(locks):
    with locks.acquire(["GPU-1"], "run a") as held:
        assert not os.get_inheritable(held._descriptors["GPU-1"])


def test_nothing_is_made_for_a_look(locks, directory):
    assert locks.held_uuids() == {}
    assert not directory.exists()


def test_only_this_user_can_reach_the_directory(locks, directory):
    locks.acquire(["GPU-1"], "run a").close()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "gpu-GPU-1.lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["writable by others", "symbolic link", "file"])
def test_a_directory_that_another_user_may_have_made_is_refused(locks, directory, tmp_path, kind):
    if kind == "symbolic link":
        directory.symlink_to(tmp_path)
    elif kind == "file":
        directory.touch()
    else:
        directory.mkdir()
        directory.chmod(0o777)
    with pytest.raises(DeviceError, match="locks"):
        locks.acquire(["GPU-1"], "run a")


def test_a_link_among_the_locks_is_no_lock(locks, directory, tmp_path):
    directory.mkdir()
    (directory / "gpu-GPU-1.lock").symlink_to(tmp_path / "elsewhere")
    assert locks.held_uuids() == {}
    with pytest.raises(OSError, match="symbolic links"):
        locks.acquire(["GPU-1"], "run a")
    assert not (tmp_path / "elsewhere").exists()


def test_a_uuid_is_no_path(locks):
    with pytest.raises(ValueError, match="is no UUID"):
        locks.acquire(["../GPU-1"], "run a")


def test_the_default_directory_is_one_per_user(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert default_lock_directory() == tmp_path / f"air_nb-{os.getuid()}"
