"""A process is known by pid and start time, and its end is noticed even when a pipe stays open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from air_nb.runs.liveness import ProcessId

_ROOT = Path(__file__).parents[3]
_PROGRAM = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from air_nb.runs.liveness import ProcessId, call_when_gone
call_when_gone(ProcessId(int(sys.argv[2]), int(sys.argv[3])), 0, lambda: os._exit(0), name="watch")
print("alive", flush=True)
time.sleep(float(sys.argv[4]))
os._exit(7)
"""


def _watch(process: ProcessId, *, hold_s: str = "0", close: bool = False) -> tuple[int, str]:
    """Exit status and output of a process that goes with that one: no output if it went before it began."""
    command = [sys.executable, "-c", _PROGRAM, str(_ROOT), str(process.pid), str(process.started_ticks), hold_s]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdin is not None
        output = watcher.stdout.readline()
        if close:
            watcher.stdin.close()
        watcher.wait(timeout=60)
        return watcher.returncode, output.strip()


def test_start_times_are_read_past_odd_program_names(tmp_path: Path):
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "3600"]) as process:
        found = ProcessId.of(process.pid)
        created_at = psutil.Process(process.pid).create_time()
        process.kill()
    assert found is not None
    assert psutil.boot_time() + found.started_ticks / os.sysconf("SC_CLK_TCK") == pytest.approx(created_at, abs=1)
    assert ProcessId.of(process.pid) is None
    assert not found.is_alive()


def test_a_zombie_is_not_alive():
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ProcessId.of(process.pid) is None


def test_a_process_goes_on_while_the_other_lives_and_its_pipe_is_open():
    assert _watch(ProcessId.own()) == (7, "alive")


def test_the_end_of_the_pipe_is_noticed():
    assert _watch(ProcessId.own(), hold_s="60", close=True) == (0, "alive")


@pytest.mark.parametrize("ticks", [1, 10**15])
def test_a_process_that_got_the_number_later_is_not_taken_for_the_other(ticks: int):
    assert _watch(ProcessId(os.getpid(), ticks), hold_s="60") == (0, "")


def test_the_end_of_the_process_is_noticed_while_its_pipe_stays_open():
    with subprocess.Popen(["sleep", "2"]) as short:
        found = ProcessId.of(short.pid)
        assert found is not None
        assert _watch(found, hold_s="60")[0] == 0


def test_a_process_that_is_gone_before_the_watch_began_counts_as_ended():
    with subprocess.Popen(["sleep", "0.2"]) as short:
        found = ProcessId.of(short.pid)
    assert found is not None
    assert _watch(found, hold_s="60") == (0, "")


def test_a_signal_reaches_the_process_it_is_meant_for():
    with subprocess.Popen(["sleep", "60"]) as process:
        found = ProcessId.of(process.pid)
        assert found is not None
        assert found.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM


def test_a_signal_does_not_reach_another_process_that_has_the_pid_now():
    with subprocess.Popen(["sleep", "60"]) as process:
        found = ProcessId.of(process.pid)
        assert found is not None
        assert not ProcessId(found.pid, found.started_ticks - 1).send_signal(signal.SIGKILL)
        assert process.poll() is None
        process.kill()
    assert not found.send_signal(signal.SIGKILL)
