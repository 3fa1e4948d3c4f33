"""The disk of the run directories is full: an error that says so and names the place, no hang, and later it works."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from air_nb.runs.directory import RunDirectory, all_runs
from air_nb.session.commands import stop_run
from tests.faults.conftest import TaggedKernel, new_kernel

_SIZE = "8m"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small file system of its own."""
    path = tmp_path_factory.mktemp("disk")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "air_nb_test", path],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture(scope="module")
def crowded(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaggedKernel]:
    """A kernel whose runs are on the small disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIR_NB_HOME", str(disk / "home"))
        yield from new_kernel(tmp_path_factory.mktemp("kernel"))


@pytest.fixture(autouse=True)
def room(crowded: TaggedKernel, disk: Path) -> Iterator[None]:
    """Each test begins with an empty disk, and ends with a kernel that works on it."""
    _make_room(disk)
    yield
    _make_room(disk)
    assert "[0-1] fine" in crowded.ok("%%distributed --nproc 2\nprint('fine')").text
    assert crowded.below_forkserver() == []


def _make_room(disk: Path) -> None:
    for path in disk.rglob("*"):
        if path.is_file():
            path.unlink()


def _fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("while True: print('x' * 100_000)", id="both ranks print"),
        pytest.param("import os\nwhile os.environ['RANK'] == '1': print('x' * 100_000)", id="one rank prints"),
        pytest.param(
            "from IPython.display import HTML, display\nwhile True: display(HTML('x' * 100_000))", id="display"
        ),
    ],
)
def test_a_rank_that_fills_the_disk_gets_its_own_error(crowded: TaggedKernel, code: str):
    cell = crowded.run(f"%%distributed --nproc 2 --output none\n{code}")
    assert cell.error is not None
    assert cell.error["ename"] == "RankFailedError"
    assert "OSError: [Errno 28] No space left on device" in cell.traceback
    assert "x' * 100_000" in cell.traceback
    assert "AIR_NB_HOME" in cell.traceback
    assert crowded.last_record()["state"] == "FAILED"


def test_a_result_that_does_not_fit_is_an_error_that_names_the_place(crowded: TaggedKernel, disk: Path):
    cell = crowded.run("%%distributed --nproc 2 --out got\nimport numpy\nnumpy.ones(2_000_000)")
    assert cell.error is not None
    assert cell.error["ename"] == "RankFailedError"
    assert "the result of 15.3 MiB can't be written to " + str(disk / "home" / "runs") in cell.traceback
    assert "AIR_NB_HOME" in cell.traceback
    assert "values.py" not in cell.traceback
    assert crowded.last_record()["state"] == "FAILED"


def test_a_launch_on_a_full_disk_is_an_error_that_names_the_place_and_leaves_nothing(crowded: TaggedKernel, disk: Path):
    crowded.ok("print('the kernel is up')")
    _fill(disk)
    before = len(list((disk / "home" / "runs").glob("*")))
    cell = crowded.run("%%distributed --nproc 2\nprint(1)")
    assert cell.error is not None
    assert cell.error["ename"] == "LauncherError"
    assert str(disk / "home") in cell.traceback
    assert "No space left on device" in cell.traceback
    assert "AIR_NB_HOME" in cell.traceback
    assert len(cell.traceback.splitlines()) == 1
    assert len(list((disk / "home" / "runs").glob("*"))) == before


def test_a_payload_that_does_not_fit_is_an_error_that_names_the_place(crowded: TaggedKernel, disk: Path):
    crowded.ok("import numpy\nlarge = numpy.ones(2_000_000)")
    cell = crowded.run("%%distributed --nproc 2\nprint(large[0])")
    assert cell.error is not None
    assert cell.error["ename"] == "LauncherError"
    assert str(disk / "home") in cell.traceback
    assert "AIR_NB_HOME" in cell.traceback


def test_a_disk_that_is_full_when_a_silent_run_ends_does_not_keep_it_from_being_recorded(
    crowded: TaggedKernel, disk: Path
):
    cell = crowded.start("%%distributed --nproc 2\nprint('go')\nimport time\ntime.sleep(2)")
    crowded.follow(cell, until=lambda cell: "[0-1] go" in cell.text)
    _fill(disk)
    crowded.follow(cell)
    assert cell.reply_status == "ok", cell.text
    assert crowded.last_record()["state"] == "FINISHED"


def test_a_run_can_be_stopped_while_the_disk_is_full(crowded: TaggedKernel, disk: Path):
    cell = crowded.start("%%distributed --nproc 2 --name on-full-disk\nprint('go')\nimport time\ntime.sleep(600)")
    crowded.follow(cell, until=lambda cell: "[0-1] go" in cell.text)
    _fill(disk)
    assert stop_run("on-full-disk") == "run on-full-disk was stopped"
    crowded.follow(cell)
    assert cell.error is not None
    assert cell.error["ename"] == "RunStoppedError"
    assert crowded.last_record()["state"] == "KILLED"


def test_a_run_that_does_not_fit_into_a_full_home_stays_where_it_is(disk: Path, tmp_path: Path, crowded: TaggedKernel):
    assert crowded.kernel.pid
    run = RunDirectory(tmp_path / "20200101-000000-abcdef12")
    run.path.mkdir()
    (run.path / "rank_0.err").write_bytes(b"kept")
    (run.path / "rank_0.out").write_bytes(bytes(12 << 20))
    home = disk / "home" / "runs" / run.run_id
    assert run.settle().path == run.path
    assert not home.exists()
    (run.path / "rank_0.out").write_bytes(b"fits")
    assert run.settle().path == home
    assert sorted(path.name for path in home.iterdir()) == ["rank_0.err", "rank_0.out"]
    assert not run.path.exists()


def test_what_could_not_be_written_leaves_what_was_there(crowded: TaggedKernel, disk: Path):
    crowded.ok("%%distributed --nproc 1\npass")
    directory = RunDirectory(all_runs()[0][0].path)
    _fill(disk)
    names = sorted(path.name for path in directory.path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        directory.update_record(reason="x" * 10_000)
    assert sorted(path.name for path in directory.path.iterdir()) == names
    assert directory.read_record().state == "FINISHED"
