import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from air_nb.errors import DeviceError
from air_nb.monitor.choose import choose_gpus
from air_nb.monitor.gpu_report import DriverState, GpuReport, GpuSample
from air_nb.monitor.locks import GpuLocks, Held
from air_nb.monitor.reserve import reserve_gpus

ROOT = Path(__file__).parents[3]
FOUR = GpuReport(
    datetime(2026, 1, 1, tzinfo=UTC), DriverState.OK, gpus=tuple(GpuSample(i, f"GPU-{i}", "H100") for i in range(4))
)


def choosing(**wanted):
    return lambda taken: choose_gpus(FOUR, taken=taken, **wanted)


@pytest.fixture
def locks(tmp_path):
    return GpuLocks(tmp_path / "locks")


def test_a_second_run_gets_other_gpus_and_a_third_none(locks):
    first, held_first = reserve_gpus(choosing(gpus=2), locks, "run a")
    second, held_second = reserve_gpus(choosing(gpus=2), locks, "run b")
    with held_first, held_second:
        assert [gpu.index for gpu in (*first, *second)] == [0, 1, 2, 3]
        with pytest.raises(DeviceError, match=r"taken by another air_nb run \(run b\)"):
            reserve_gpus(choosing(gpus=1), locks, "run c")
    assert locks.held_uuids() == {}


def test_a_gpu_that_goes_between_the_look_and_the_lock_is_left_out(locks):
    others: list[Held] = []

    def choose(taken):
        chosen = choose_gpus(FOUR, gpus=2, taken=taken)
        if not others:  # the other kernel is quicker, once
            others.append(locks.acquire([chosen[1].uuid], "run a"))
        return chosen

    chosen, held = reserve_gpus(choose, locks, "run b")
    with held, others[0]:
        assert [gpu.index for gpu in chosen] == [0, 2]


class Forgetful(GpuLocks):
    """As if every holder let go between the refusal and the next look."""

    def held_uuids(self):
        return {}


def test_a_gpu_that_was_refused_once_is_not_tried_for_ever(tmp_path):
    locks = Forgetful(tmp_path / "locks")
    with locks.acquire(["GPU-0"], "run a"):
        chosen, held = reserve_gpus(choosing(gpus=1), locks, "run b")
        held.close()
    assert [gpu.index for gpu in chosen] == [1]


CONTENDER = """
import sys
sys.path.insert(0, sys.argv[1])
from datetime import UTC, datetime
from pathlib import Path
from air_nb.monitor.choose import choose_gpus
from air_nb.monitor.locks import GpuLocks
from air_nb.monitor.reserve import reserve_gpus
from air_nb.monitor.gpu_report import DriverState, GpuReport, GpuSample

report = GpuReport(datetime.now(UTC), DriverState.OK, gpus=tuple(GpuSample(i, f"GPU-{i}", "H100") for i in range(4)))
sys.stdin.readline()
chosen, held = reserve_gpus(lambda taken: choose_gpus(report, gpus=2, taken=taken), GpuLocks(Path(sys.argv[2])), "run")
print(*(gpu.index for gpu in chosen), flush=True)
sys.stdin.readline()
"""


def say(contender, line):
    contender.stdin.write(line + "\n")
    contender.stdin.flush()


def hear(contender):
    return contender.stdout.readline().split()


def test_two_kernels_that_choose_at_the_same_time_share_no_gpu(tmp_path):
    command = [sys.executable, "-c", CONTENDER, str(ROOT), str(tmp_path / "locks")]
    start = partial(subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with start() as one, start() as two:
        say(one, "go")
        say(two, "go")
        assert sorted(hear(one) + hear(two)) == ["0", "1", "2", "3"]
        say(one, "end")
        say(two, "end")
