"""What the kernel's log and counters say of a process that was killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from air_nb.launch.oom import OomWatch, counter_paths, killed_in_log, kills_counted

_LOG = """6,1021,5201,-;python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
6,1022,5202,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,task=python,pid=812,uid=0
3,1023,5203,-;Out of memory: Killed process 812 (python 3) total-vm:9000000kB, anon-rss:6291456kB, file-rss:0kB, UID:0
3,1024,5204,-;Memory cgroup out of memory: Killed process 9 (x) total-vm:1000kB, anon-rss:524288kB, file-rss:8kB
"""


@pytest.mark.parametrize(
    "text,count",
    [
        ("low 0\nhigh 0\nmax 41\noom 3\noom_kill 2\noom_group_kill 7\n", 2),  # memory.events
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),  # memory.oom_control
        ("pgfault 12\noom_kill 0\n", 0),  # /proc/vmstat
        ("oom_kill_disable 1\nunder_oom 0\n", None),  # a kernel from before 4.13
        ("", None),
    ],
)
def test_counters_of_every_kind_are_read(text: str, count: int | None):
    assert kills_counted(text) == count


def test_the_log_names_the_process_and_what_it_held():
    assert killed_in_log(_LOG, 812) == "the kernel's log says that it was killed holding 6.0 GiB"
    assert killed_in_log(_LOG, 9) == "the kernel's log says that it was killed holding 0.5 GiB"
    assert killed_in_log(_LOG, 81) is None
    assert killed_in_log("", 812) is None


def test_the_counters_of_both_versions_of_control_groups_are_found():
    assert counter_paths("0::/user.slice/a:b.scope\n") == [
        Path("/sys/fs/cgroup/user.slice/a:b.scope/memory.events"),
        Path("/sys/fs/cgroup/unified/user.slice/a:b.scope/memory.events"),
    ]
    assert counter_paths("5:devices:/\n4:cpu,memory:/jobs/7\n") == [
        Path("/sys/fs/cgroup/memory/jobs/7/memory.oom_control")
    ]
    assert counter_paths("") == []


class _Files:
    """The kernel's files, and a watch that reads them."""

    def __init__(self, tmp_path: Path) -> None:
        self.log = tmp_path / "kmsg"
        self.machine = tmp_path / "vmstat"
        self.group = tmp_path / "group"
        (tmp_path / "cgroup").write_text("")
        self.log.write_text(_LOG)
        self.machine.write_text("oom_kill 7\n")
        self.watch = OomWatch(self.log, tmp_path / "cgroup", self.machine)

    def close(self) -> None:
        self.watch.close()


@pytest.fixture
def files(tmp_path: Path):
    files = _Files(tmp_path)
    yield files
    files.close()


def test_what_the_log_held_before_is_of_another_process_with_this_pid(files: _Files):
    assert "not for lack of memory" in str(files.watch.explain(812))
    with files.log.open("a") as log:
        log.write(_LOG)
    assert files.watch.explain(812) == (
        "the system ran out of memory: the kernel's log says that it was killed holding 6.0 GiB"
    )


def test_without_the_log_the_counter_of_the_machine_tells(tmp_path: Path, files: _Files):
    watch = OomWatch(tmp_path / "not readable", tmp_path / "cgroup", files.machine)
    assert "not for lack of memory" in str(watch.explain(812))
    files.machine.write_text("oom_kill 8\n")
    assert "the kernel killed a process of the machine" in str(watch.explain(812))


def test_the_counter_of_the_control_group_is_nearer(tmp_path: Path, monkeypatch):
    group = tmp_path / "memory.events"
    machine = tmp_path / "vmstat"
    group.write_text("oom_kill 0\n")
    machine.write_text("oom_kill 3\n")
    monkeypatch.setattr("air_nb.launch.oom.counter_paths", lambda _groups: [group])
    watch = OomWatch(tmp_path / "not readable", tmp_path / "not there", machine)
    group.write_text("oom_kill 1\n")
    machine.write_text("oom_kill 4\n")
    assert "of the control group that ranks are in" in str(watch.explain(1))


def test_where_nothing_is_readable_nothing_is_said(tmp_path: Path):
    absent = tmp_path / "absent"
    before = len(list(Path("/proc/self/fd").iterdir()))
    watch = OomWatch(absent, absent, absent)
    assert watch.explain(1) is None
    watch.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_this_machines_own_files_can_be_read_or_are_left_alone():
    watch = OomWatch()
    assert watch.explain(os.getpid()) is None or "not for lack of memory" in str(watch.explain(os.getpid()))
    watch.close()
    watch.close()
