"""The disk of the run directories is slow (a network's, a worn one): all comes home, and nobody waits in vain."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from air_nb.runs.directory import RunRecord, all_runs
from tests.faults.conftest import PROGRAMS, TaggedKernel, new_kernel
from tests.support.kernel import Cell
from tests.support.screen import body, on_ranks
from tests.support.wait import eventually

_WAIT_MS = 30
_ANSWER_S = 2.0
_OPTIONS = "--nproc 4 --device cpu"
_WORK = """
import os, sys, numpy
from IPython.display import HTML, display
rank = int(os.environ["RANK"])
print("begin", rank)
for i in range(6):
    print(f"\\rrank {rank}: {i}/5", end="", file=sys.stderr)
print(file=sys.stderr)
display(HTML(f"<b>figure {rank}</b>"))
for i in range(5):
    print("line", rank, i)
print("end", rank, file=sys.stderr)
numpy.full(300_000, rank)
"""
_SHOWN = ["begin {0}", "rank {0}: 5/5", "<b>figure {0}</b>", *(f"line {{0}} {i}" for i in range(5)), "end {0}"]
_ENDLESS = "import time\nfor i in range(10**9): print('go', i)"


class _Wait(NamedTuple):
    """Somebody waited for the disk."""

    pid: int
    call: str
    path: Path


@dataclass(frozen=True)
class SlowDisk:
    """A folder that is slow for kernels started now and all that they start."""

    folder: Path
    log: Path

    @property
    def runs(self) -> list[Path]:
        return sorted((self.folder / "home" / "runs").glob("*"))

    def waits(self) -> list[_Wait]:
        """All waits up to now."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [_Wait(int(pid), call, Path(path)) for pid, call, path in (line.split(" ", 2) for line in lines)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled culprit."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    built = tmp_path_factory.mktemp("library") / "slow_disk.so"
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, "-o", built, PROGRAMS / "slow_disk.c"], check=True)
    return built


@pytest.fixture(scope="module")
def disk(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowDisk]:
    disk = SlowDisk(tmp_path_factory.mktemp("slow").resolve(), tmp_path_factory.mktemp("log") / "waits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("SLOW_DIR", str(disk.folder))
        patch.setenv("SLOW_MS", str(_WAIT_MS))
        patch.setenv("SLOW_LOG", str(disk.log))
        patch.setenv("AIR_NB_HOME", str(disk.folder / "home"))
        yield disk


@pytest.fixture(scope="module")
def slow(disk: SlowDisk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaggedKernel]:
    """A kernel whose runs are on the slow disk."""
    for kernel in new_kernel(tmp_path_factory.mktemp("kernel")):
        kernel.ok("%%distributed --nproc 1 --quiet\npass")
        yield kernel


@pytest.fixture(autouse=True)
def nothing_is_left(slow: TaggedKernel, disk: SlowDisk) -> Iterator[None]:
    """Each test ends without ranks, half-written files and values that nobody fetched, and with a kernel that works."""
    yield
    assert slow.below_forkserver() == []
    files = [file.name for run in disk.runs for file in run.iterdir()]
    assert [name for name in files if name.startswith(".") or name.endswith((".tmp", ".result"))] == []
    assert "[0-1] fine" in slow.ok("%%distributed --nproc 2 --device cpu\nprint('fine')").text


def _last_run(kernel: TaggedKernel) -> tuple[Path, RunRecord]:
    run_id = kernel.last_record()["run_id"]
    return next((directory.path, record) for directory, record in all_runs() if record.run_id == run_id)


def _shown_by_rank(cell: Cell) -> dict[int, list[str]]:
    """What the cell shows, from top to bottom; none of it is the same on two ranks, so nothing is folded."""
    shown: dict[int, list[str]] = {}
    for output in body(cell):
        if html := re.fullmatch(r"<b>figure (\d)</b>", output["data"].get("text/html", "")):
            shown.setdefault(int(html[1]), []).append(html[0])
            continue
        for line in output["text"].splitlines():
            if whose := re.fullmatch(r"\[(\d)\] (.+)", line):
                shown.setdefault(int(whose[1]), []).append(whose[2])
    return shown


def _follow_for(seconds: float, kernel: TaggedKernel, cell: Cell) -> None:
    end = time.monotonic() + seconds
    kernel.follow(cell, until=lambda _: time.monotonic() > end)


def test_kernel_launcher_and_ranks_wait_for_the_disk(slow: TaggedKernel, disk: SlowDisk):
    """Else the other tests here would say nothing."""
    before = len(disk.waits())
    slow.ok(on_ranks("print(1)", _OPTIONS))
    waits = disk.waits()[before:]
    ranks = [rank.pid for rank in _last_run(slow)[1].ranks if rank is not None]
    assert len(ranks) == 4
    assert {wait.pid for wait in waits} >= {slow.kernel.pid, slow.launcher().pid, *ranks}
    assert {wait.call for wait in waits} >= {"open", "write", "rename"}
    slow.ok(f"from pathlib import Path\nimport os, time\nplain = Path({str(disk.folder)!r}, 'plain')")
    slow.ok("began = time.monotonic()\nplain.write_text('x')\nos.replace(plain, plain.with_suffix('.new'))")
    assert float(slow.value("time.monotonic() - began")) >= 3 * _WAIT_MS / 1000


def test_output_and_values_come_home_whole_and_in_order(slow: TaggedKernel):
    cell = slow.ok(on_ranks(_WORK, f"{_OPTIONS} --out got"), timeout_s=120)
    assert _shown_by_rank(cell) == {rank: [text.format(rank) for text in _SHOWN] for rank in range(4)}
    assert slow.value("[(len(values), set(values.tolist())) for values in got]") == (
        "[(300000, {0}), (300000, {1}), (300000, {2}), (300000, {3})]"
    )
    directory, record = _last_run(slow)
    assert record.state == "FINISHED"
    for rank in range(4):
        lines = (directory / f"rank_{rank}.out").read_text().splitlines()
        assert lines == [f"begin {rank}", *(f"line {rank} {i}" for i in range(5))]


def test_the_exception_of_a_rank_is_raised(slow: TaggedKernel):
    code = "import os, time\nif os.environ['RANK'] == '2': raise KeyError('of rank 2')\ntime.sleep(600)"
    cell = slow.run(on_ranks(code, _OPTIONS))
    assert cell.error is not None
    assert cell.error["ename"] == "RankFailedError"
    assert "rank 2 of 4 failed" in cell.traceback
    assert "KeyError: 'of rank 2'" in cell.traceback
    assert "ranks 0-1, 3 were stopped" in cell.traceback
    assert slow.value("__import__('sys').last_value.__cause__") == "KeyError('of rank 2')"
    assert _last_run(slow)[1].state == "FAILED"


def test_an_interrupt_ends_ranks_that_write(slow: TaggedKernel):
    cell, seconds = slow.interrupt_when_shown(on_ranks(_ENDLESS, _OPTIONS), "go 3")
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert len(cell.traceback.splitlines()) == 1, cell.traceback
    assert seconds < 11  # after 12 s the kernel gives up on the launcher and kills it
    assert _last_run(slow)[1].state == "KILLED"


@pytest.mark.parametrize(
    "name, is_a_run",
    [
        pytest.param("task.json", False, id="the kernel writes the run's files"),
        pytest.param("rank_2.events", True, id="the ranks' files are opened"),
    ],
)
def test_an_interrupt_during_the_launch_ends_it(slow: TaggedKernel, disk: SlowDisk, name: str, is_a_run: bool):
    waits, runs = len(disk.waits()), len(disk.runs)
    cell = slow.start(on_ranks(_ENDLESS, _OPTIONS))
    assert eventually(lambda: any(wait.path.name == name for wait in disk.waits()[waits:]), 30)
    slow.kernel.interrupt()
    slow.follow(cell)
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert len(cell.traceback.splitlines()) == 1, cell.traceback
    assert len(disk.runs) == runs + is_a_run
    assert not is_a_run or _last_run(slow)[1].state == "KILLED"


def test_the_kernel_answers_on_the_control_channel_meanwhile(slow: TaggedKernel):
    client = slow.kernel.client
    cell = slow.start(on_ranks(_WORK, _OPTIONS))
    answers = 0
    while not cell.idle_at:
        request = client.session.msg("kernel_info_request")
        client.control_channel.send(request)
        reply = client.get_control_msg(timeout=_ANSWER_S)
        assert reply["parent_header"]["msg_id"] == request["header"]["msg_id"]
        answers += 1
        _follow_for(0.1, slow, cell)
    assert cell.reply_status == "ok", cell.text
    assert answers >= 5


def test_nothing_outlives_a_kernel_that_is_killed_while_all_wait_for_the_disk(cold_kernel: TaggedKernel):
    cell = cold_kernel.start(on_ranks(_ENDLESS, _OPTIONS))
    cold_kernel.follow(cell, until=lambda cell: "go 3" in cell.text)
    run_id = cold_kernel.last_record()["run_id"]
    assert len(cold_kernel.processes()) >= 4 + 3  # kernel, launcher, forkserver
    cold_kernel.kernel.kill()
    eventually(lambda: not cold_kernel.processes(), 20)
    left = cold_kernel.processes()
    for process in left:
        process.kill()
    assert left == []
    assert next(record for _, record in all_runs() if record.run_id == run_id).state == "KILLED"
