import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from air_nb.monitor.lifeline import start_ticks

ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[1])
from air_nb.monitor.lifeline import exit_with_parent
exit_with_parent(int(sys.argv[2]), int(sys.argv[3]), 0)
print("alive", flush=True)
time.sleep(float(sys.argv[4]))
"""


def watch(pid, ticks, *, hold_s="0"):
    """Exit status and output of a process that goes with that one: no output if it went before it began."""
    command = [sys.executable, "-c", PROGRAM, str(ROOT), str(pid), str(ticks), hold_s]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
    return process.returncode, output.strip()


def test_start_ticks_are_read_past_odd_program_names(tmp_path):
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "3600"]) as process:
        ticks = start_ticks(process.pid)
        created_at = psutil.Process(process.pid).create_time()
        process.kill()
    assert ticks is not None
    assert psutil.boot_time() + ticks / os.sysconf("SC_CLK_TCK") == pytest.approx(created_at, abs=1)
    assert start_ticks(process.pid) is None


def test_a_process_goes_on_while_its_parent_lives():
    assert watch(os.getpid(), start_ticks(os.getpid())) == (0, "alive")


@pytest.mark.parametrize("ticks", [1, 10**15])
def test_a_process_that_got_the_parents_number_later_is_not_taken_for_it(ticks):
    assert watch(os.getpid(), ticks, hold_s="60") == (0, "")


def test_a_parent_that_is_gone_before_the_watch_began_ends_the_process():
    with subprocess.Popen(["true"]) as short:
        ticks = start_ticks(short.pid)
    assert watch(short.pid, ticks, hold_s="60") == (0, "")
