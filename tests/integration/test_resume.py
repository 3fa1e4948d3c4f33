"""Trainings in ``%%distributed`` cells that are killed, interrupted or stopped, and go on in another cell."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from air_nb.checkpoint import list_checkpoints
from air_nb.runs.directory import all_runs
from tests.support.kernel import Cell, Kernel, running_kernel
from tests.support.mlflow_stores import read_runs, sqlite_store
from tests.support.wait import eventually

pytestmark = pytest.mark.timeout(600)

_SAMPLES = 72
_GLOBAL_BATCH = 12
_EPOCHS = 3
_STEPS = _EPOCHS * _SAMPLES // _GLOBAL_BATCH
_PATIENCE_S = 120.0

# Rows of a step that a checkpoint does not have are not true: the training itself takes them back when it goes on.
_TRAINING = """
import json, os, signal, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from air_nb.checkpoint import CheckpointManager, seed_everything
from air_nb.data import DataLoader, FileDataset
from air_nb.runtime import init_process_group

def read(path):
    number = int(Path(path).stem)
    value = float(Path(path).read_text()) + 0.01 * torch.rand(1, dtype=torch.float64)
    return number, torch.cat([value, value**2])

def roll_back(ledger, step):
    for path in ledger.glob("rank_*.jsonl"):
        rows = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] < step]
        path.write_text("".join(rows))

init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(2, 1).double())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
dataset = FileDataset("files", "*.txt", decode=read, shuffle=True, seed=3)
loader = DataLoader(dataset, batch_size=job["batch_size"], num_workers=job["num_workers"])
seed_everything(1)

ledger = Path(job["root"]) / "ledger"
manager = CheckpointManager(
    Path(job["root"]) / "checkpoints", model=model, optimizer=optimizer, scheduler=scheduler, data=loader,
    every=job["every"], keep=100, resume=job["resume"],
)
begin = manager.restore() or 0
if rank == 0:
    ledger.mkdir(parents=True, exist_ok=True)
    roll_back(ledger, begin)
dist.barrier()
with open(ledger / f"rank_{rank}.jsonl", "a") as rows, manager:
    for step, (numbers, x) in manager.steps(epochs=job["epochs"]):
        epoch = loader.epoch
        loss = (model(x) - 1).square().mean()
        total = loss.detach() / world_size
        dist.all_reduce(total)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        row = {"step": step, "epoch": epoch, "ids": numbers[loader.valid].tolist(), "loss": total.item()}
        print(json.dumps(row | {"pid": os.getpid()}), file=rows, flush=True)
        if [step, rank] == job["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if job["pause_s"]:
            print(f"<step {step}>")
        time.sleep(job["pause_s"])
begin
"""


@dataclass(frozen=True, slots=True)
class Job:
    """What one cell trains.

    Attributes:
        root: Name of a directory in the kernel's own, for checkpoints and ledger.
        kill: Step at which, and rank that, dies of SIGKILL.
        pause_s: How long each step takes; steps are printed then.
    """

    root: str
    batch_size: int = 6
    num_workers: int = 0
    epochs: int = _EPOCHS
    every: int | None = 4
    resume: str = "auto"
    kill: tuple[int, int] | None = None
    pause_s: float = 0.0


class Study:
    """Trainings of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def start(self, job: Job, options: str = "") -> Cell:
        """Send the cell: two ranks, unless the options say otherwise."""
        self.kernel.ok(f"job = __import__('json').loads({json.dumps(asdict(job))!r})")
        return self.kernel.start(f"%%distributed --nproc 2 --quiet --out began {options}\n{_TRAINING}")

    def train(self, job: Job, options: str = "") -> Cell:
        return self.kernel.follow(self.start(job, options), timeout_s=_PATIENCE_S)

    def began(self, job: Job, options: str = "") -> str:
        """Train to the end; the step that each rank began with."""
        cell = self.train(job, options)
        assert cell.reply_status == "ok", cell.text
        return self.kernel.value("began")

    def until(self, job: Job, text: str, options: str = "") -> Cell:
        """Train until the text is shown, and leave it running."""
        cell = self.start(job, options)
        self.follow_until(cell, text)
        assert not cell.idle_at, cell.text
        return cell

    def follow_until(self, cell: Cell, text: str) -> None:
        self.kernel.follow(cell, until=lambda cell: text in cell.text, timeout_s=_PATIENCE_S)

    def checkpoints(self, job: Job) -> list[int | None]:
        """Steps of the valid ones, newest first."""
        found = list_checkpoints(self.kernel.cwd / job.root / "checkpoints")
        return [checkpoint.step for checkpoint in found if checkpoint.is_valid]

    def path(self, job: Job, step: int) -> Path:
        (path,) = (self.kernel.cwd / job.root / "checkpoints").glob(f"step_{step}.*")
        return path

    def rows(self, job: Job) -> list[dict[str, Any]]:
        """What all ranks have noted, by step."""
        files = (self.kernel.cwd / job.root / "ledger").glob("rank_*.jsonl")
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return sorted(rows, key=lambda row: row["step"])

    def losses(self, job: Job) -> list[float]:
        """One for each step; all ranks noted the same."""
        by_step: dict[int, set[float]] = {}
        for row in self.rows(job):
            by_step.setdefault(row["step"], set()).add(row["loss"])
        assert list(by_step) == list(range(len(by_step)))
        assert all(len(losses) == 1 for losses in by_step.values())
        return [losses.pop() for losses in by_step.values()]

    def samples(self, job: Job) -> list[list[int]]:
        """Sorted ids of each step, of all ranks together."""
        by_step: dict[int, list[int]] = {}
        for row in self.rows(job):
            by_step.setdefault(row["step"], []).extend(row["ids"])
        return [sorted(ids) for ids in by_step.values()]

    def state(self) -> str:
        """How the last run ended."""
        return str(all_runs()[0][1].state)


def _make_files(directory: Path) -> None:
    (directory / "files").mkdir()
    for number in range(_SAMPLES):
        (directory / "files" / f"{number:03}.txt").write_text(f"{number / _SAMPLES}\n")


@pytest.fixture(scope="module")
def study(kernel: Kernel) -> Study:
    _make_files(kernel.cwd)
    return Study(kernel)


@pytest.fixture(scope="module")
def trained(study: Study) -> Job:
    """A training that nothing has happened to; it is not to be trained further."""
    job = Job("uninterrupted")
    assert study.began(job) == "[0, 0]"
    return job


# ---------------------------------------------------------------------------------------------- killed, and resumed


def test_a_training_killed_twice_on_2_and_3_ranks_ends_as_one_that_was_not(study, trained):
    killed = study.train(Job("killed", kill=(9, 1)))
    assert "rank 1 (pid" in killed.traceback
    assert "SIGKILL" in killed.traceback
    killed = study.train(Job("killed", batch_size=4, num_workers=2, kill=(14, 0)), "--nproc 3")
    assert "resumed step" in killed.text
    assert "SIGKILL" in killed.traceback
    began = study.began(last := Job("killed", batch_size=12, num_workers=1), "--nproc 1")

    assert began in {"[8]", "[12]"}
    assert study.losses(last) == pytest.approx(study.losses(trained), rel=1e-9)
    assert study.samples(last) == study.samples(trained)
    for epoch in range(_EPOCHS):
        ids = [number for row in study.rows(last) if row["epoch"] == epoch for number in row["ids"]]
        assert sorted(ids) == list(range(_SAMPLES))


def test_on_the_same_ranks_it_is_the_same_to_the_last_bit(study, trained):
    assert "SIGKILL" in study.train(Job("killed once", kill=(9, 0))).traceback
    assert study.began(last := Job("killed once")) in {"[4, 4]", "[8, 8]"}

    assert study.losses(last) == study.losses(trained)
    assert [(row["ids"], row["epoch"]) for row in study.rows(last)] == [
        (row["ids"], row["epoch"]) for row in study.rows(trained)
    ]


# ---------------------------------------------------------------------------------------------------------- --resume


@pytest.fixture(scope="module")
def twice(study: Study) -> Job:
    """One epoch more each time that it is asked for, from checkpoints that there are."""
    job = Job("options", epochs=1, every=2)
    assert study.began(job) == "[0, 0]"
    assert study.checkpoints(job) == [6, 4, 2]
    return job


def test_auto_goes_on_where_there_is_a_checkpoint_and_must_as_well(study, twice):
    assert study.began(twice) == "[6, 6]"
    assert study.began(twice, "--resume auto") == "[6, 6]"
    assert study.began(twice, "--resume must") == "[6, 6]"


def test_the_option_is_stronger_than_the_program(study, twice):
    stubborn = Job(**{**asdict(twice), "resume": "never"})

    assert study.began(stubborn, "--resume auto") == "[6, 6]"


def test_a_path_is_the_checkpoint_that_is_gone_on_with(study, twice):
    absolute = study.path(twice, 4)

    assert study.began(twice, f"--resume {absolute}") == "[4, 4]"
    assert study.began(twice, f"--resume {study.path(twice, 2).relative_to(study.kernel.cwd)}") == "[2, 2]"


def test_never_starts_afresh(study, twice):
    cell = study.train(twice, "--resume never")

    assert study.kernel.value("began") == "[0, 0]"
    assert "resumed" not in cell.text


def test_must_without_a_checkpoint_is_an_error_that_says_so(study):
    cell = study.train(Job("nothing yet"), "--resume must")

    assert cell.reply_status == "error"
    assert "CheckpointNotFoundError" in cell.traceback
    assert f"there is no checkpoint in {Path('nothing yet/checkpoints')}" in cell.traceback
    assert "'auto' starts afresh then" in cell.traceback


def test_a_path_without_a_checkpoint_is_an_error_that_names_it(study):
    cell = study.train(Job("nothing yet"), "--resume elsewhere/step_3.00000000")

    assert cell.reply_status == "error"
    assert str(study.kernel.cwd / "elsewhere" / "step_3.00000000") in cell.traceback


# --------------------------------------------------------------------------------------------- interrupted and stopped


def test_an_interrupt_saves_the_step_that_it_came_in_and_the_next_cell_goes_on(study, trained):
    job = Job("interrupted", every=None, num_workers=2, pause_s=0.3)
    cell = study.until(job, "<step 3>")
    study.kernel.interrupt()
    study.kernel.follow(cell, timeout_s=_PATIENCE_S)

    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert "saving a checkpoint at the next step, interrupt again to stop now" in cell.text
    done = study.rows(job)[-1]["step"] + 1
    assert study.checkpoints(job) == [done]
    assert f"saved step {done}" in cell.text
    assert study.state() == "KILLED"

    assert study.began(last := Job("interrupted", every=None)) == f"[{done}, {done}]"
    assert study.losses(last) == study.losses(trained)
    assert study.samples(last) == study.samples(trained)


def test_two_interrupts_do_not_wait_for_the_step(study):
    job = Job("interrupted twice", every=1, pause_s=300)
    cell = study.until(job, "<step 0>")
    study.kernel.interrupt()
    study.follow_until(cell, "interrupt again to stop now")
    study.kernel.interrupt()
    study.kernel.follow(cell, timeout_s=30)

    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert study.state() == "KILLED"
    assert study.checkpoints(job) == []
    assert study.began(Job("interrupted twice", epochs=1)) == "[0, 0]"


def test_a_step_that_takes_longer_than_the_grace_is_not_waited_for(study):
    job = Job("too long", every=1, pause_s=300)
    cell = study.until(job, "<step 0>", "--env AIR_NB_STOP_GRACE_S=1")
    study.kernel.interrupt()
    study.kernel.follow(cell, timeout_s=30)

    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert study.checkpoints(job) == []


def test_a_kernel_that_is_restarted_takes_its_ranks_along_and_the_next_one_goes_on(study, trained, tmp_path):
    _make_files(tmp_path)
    with running_kernel(tmp_path, env={"AIR_NB_DEVICE": "cpu"}) as kernel:
        restarted = Study(kernel)
        restarted.until(Job("restarted", every=1, pause_s=0.3), "<step 7>")
        kernel.restart()
        kernel.ok("%load_ext air_nb")
        began = restarted.began(last := Job("restarted"))

        assert began in {f"[{step}, {step}]" for step in range(6, 9)}
        assert restarted.losses(last) == study.losses(trained)
        assert restarted.samples(last) == study.samples(trained)


def test_stop_from_another_notebook_saves_first_and_runs_lists_the_checkpoints(study, tmp_path):
    job = Job("stopped", every=1, pause_s=5)  # longer than a rank has that would not save
    with running_kernel(tmp_path) as other:
        cell = study.until(job, "<step 1>", "--name stop-me")
        assert "was stopped" in other.ok("%air stop stop-me").text
        study.kernel.follow(cell, timeout_s=_PATIENCE_S)
        listing = other.ok("%air runs").text.splitlines()

    assert cell.reply_status == "error"
    done = study.rows(job)[-1]["step"] + 1
    steps = study.checkpoints(job)
    assert steps[0] == done
    at = next(number for number, line in enumerate(listing) if line.startswith("stop-me"))
    assert "KILLED" in listing[at]
    expected = f"checkpoints: step {', '.join(map(str, reversed(steps)))}; --resume {study.path(job, done)}"
    assert listing[at + 1].strip() == expected


def test_sigterm_for_one_rank_lets_all_save_first(study):
    job = Job("terminated", every=None, pause_s=0.3)
    cell = study.until(job, "<step 2>")
    os.kill(study.rows(job)[-1]["pid"], signal.SIGTERM)
    study.kernel.follow(cell, timeout_s=_PATIENCE_S)

    assert cell.reply_status == "error"
    done = study.rows(job)[-1]["step"] + 1
    assert done < _STEPS
    assert f"saved step {done}" in cell.text
    assert study.checkpoints(job) == [done]
    assert study.state() == "FAILED"


# ------------------------------------------------------------------------------------------------------------- MLflow


@pytest.fixture
def tracked(tmp_path: Path, test_environment) -> Iterator[tuple[Study, str]]:
    """A notebook with MLflow, and its store."""
    _make_files(tmp_path)
    store = sqlite_store(tmp_path)
    env = {
        "AIR_NB_DEVICE": "cpu",
        "AIR_NB_TRACKING": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
    }
    with running_kernel(tmp_path, env=env) as kernel:
        yield Study(kernel), store


def test_each_checkpoint_is_a_tag_of_the_mlflow_run(tracked):
    study, store = tracked
    job = Job("tracked", epochs=1, every=3)
    assert study.began(job) == "[0, 0]"

    assert eventually(lambda: [run.status for run in read_runs(store)] == ["FINISHED"], _PATIENCE_S)
    (run,) = read_runs(store)
    tags = {name: value for name, value in run.tags.items() if name.startswith("air_nb.checkpoint.")}
    assert tags == {f"air_nb.checkpoint.{step}": str(study.path(job, step)) for step in (3, 6)}
