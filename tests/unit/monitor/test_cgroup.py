import pytest

from air_nb.monitor.cgroup import CgroupLimits, MemoryLimit

MIB = 1 << 20


@pytest.fixture
def group(tmp_path):
    """Makes a group below the root, and writes its files."""

    def make(path="", **files):
        folder = tmp_path / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("_", ".", 1)).write_text(text)
        return folder

    return make


def test_without_version_2_or_limits_there_are_none(tmp_path, group):
    for limits in (CgroupLimits(tmp_path, "4:memory:/pod\n"), CgroupLimits(tmp_path, "0::/pod\n")):
        assert (limits.memory(), limits.cpus(), limits.cpu_used_s()) == (None, None, None)
    group("pod", memory_max="max\n", memory_current="5\n", cpu_max="max 100000\n")
    limits = CgroupLimits(tmp_path, "0::/pod\n")
    assert (limits.memory(), limits.cpus(), limits.cpu_used_s()) == (None, None, None)


def test_a_container_sees_its_own_group_at_the_root(tmp_path, group):
    stat = f"anon {300 * MIB}\ninactive_file {100 * MIB}\nworkingset a b c\n"
    group(memory_max=f"{1024 * MIB}\n", memory_current=f"{400 * MIB}\n", memory_stat=stat)
    group(cpu_max="150000 100000\n", cpu_stat="usage_usec 2500000\nuser_usec 1\n")
    limits = CgroupLimits(tmp_path, "0::/\n")
    assert limits.memory() == MemoryLimit(300 * MIB, 1024 * MIB)
    assert (limits.cpus(), limits.cpu_used_s()) == (1.5, 2.5)


def test_the_tightest_limit_above_the_process_counts_with_what_that_group_uses(tmp_path, group):
    group("slurm", memory_max=f"{10 * MIB}", memory_current=f"{9 * MIB}", cpu_max="400000 100000")
    group("slurm/job", memory_max=f"{64 * MIB}", memory_current=f"{MIB}", cpu_max="max 100000")
    group("slurm/job/step", memory_max="max", memory_current="1", cpu_max="800000 100000")
    limits = CgroupLimits(tmp_path, "1:name=systemd:/x\n0::/slurm/job/step\n")
    assert limits.memory() == MemoryLimit(9 * MIB, 10 * MIB)
    assert limits.cpus() == 4.0
    assert limits.cpu_used_s() is None  # not told


def test_a_path_of_the_host_that_is_not_there_leads_to_the_root(tmp_path, group):
    group(memory_max=f"{MIB}", memory_current="4096")
    assert CgroupLimits(tmp_path, "0::/kubepods/pod1/abc\n").memory() == MemoryLimit(4096, MIB)


def test_a_path_that_leads_out_of_the_mount_is_not_followed(tmp_path, group):
    group("out", memory_max="1", memory_current="1")
    inside = group("mount")
    assert CgroupLimits(inside, "0::/../out\n").memory() is None
