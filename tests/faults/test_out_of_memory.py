"""A rank that the kernel kills for lack of memory: the error says so, and does not only guess."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.conftest import TaggedKernel

_GROUPS = Path("/sys/fs/cgroup")
_LIMIT_BYTES = 400 << 20
_HOG = """%%distributed --nproc 2
import os, time
if os.environ['RANK'] == '0':
    time.sleep(600)
with open({join!r}, 'w') as file:
    file.write(str(os.getpid()))
held = []
while True:
    held.append(b'x' * (16 << 20))
"""


@pytest.fixture
def small_group():
    """A control group with little memory; the file that a process joins it by."""
    first = _GROUPS / "memory"
    version_1 = first.is_dir()
    group = (first if version_1 else _GROUPS) / f"air_nb_test_{os.getpid()}"
    limit = group / ("memory.limit_in_bytes" if version_1 else "memory.max")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        limit.write_text(str(_LIMIT_BYTES))
        yield group / "cgroup.procs"
    except OSError as error:
        pytest.skip(f"no memory limit can be set here: {error}")
    finally:
        group.rmdir()


def test_a_rank_killed_for_lack_of_memory_is_named_with_the_kernels_own_word(kernel: TaggedKernel, small_group: Path):
    cell = kernel.run(_HOG.format(join=str(small_group)), timeout_s=120)
    assert cell.error is not None
    assert cell.error["ename"] == "RankFailedError"
    assert "rank 1 of 2 failed" in cell.traceback
    assert "was killed by SIGKILL" in cell.traceback
    assert "hint: the system ran out of memory: the kernel" in cell.traceback
    assert kernel.below_forkserver() == []


def test_a_rank_killed_by_somebody_is_not_said_to_have_lacked_memory(kernel: TaggedKernel):
    cell = kernel.run("%%distributed --nproc 2\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert "was killed by SIGKILL" in cell.traceback
    assert "the system ran out of memory: the kernel" not in cell.traceback
    assert "hint: " in cell.traceback
