"""A training that is saved, ends, and goes on: one process."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
import uuid

import psutil
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from air_nb.checkpoint import CheckpointManager, VolumeWriter, list_checkpoints, verify
from air_nb.data import DataLoader
from air_nb.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DataError,
)
from tests.support.trainings import SAMPLES, Training, flip, only_checkpoint, train

STEPS = 20  # of two epochs


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train(Training(str(tmp_path_factory.mktemp("uninterrupted"))))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


def a_model():
    torch.manual_seed(1)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("leave_at", [1, 3, 4, 9, 10, 11, 19])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_resumed_is_uninterrupted_bit_for_bit(root, uninterrupted, leave_at, asynchronous):
    training = Training(str(root), leave_at=leave_at, options={"asynchronous": asynchronous})
    first = train(training)
    second = train(Training(str(root)))
    saved = leave_at // 3 * 3 if leave_at >= 3 else 0
    assert second.steps == list(range(saved, STEPS))
    assert first.losses[:saved] + second.losses == uninterrupted.losses
    assert first.samples[:saved] + second.samples == uninterrupted.samples
    assert second.state == uninterrupted.state
    assert second.draws == uninterrupted.draws


def test_the_second_and_third_resume_within_an_epoch_go_on_as_well(root, uninterrupted):
    losses = []
    for leave_at in (4, 7, 10, 14, None):
        outcome = train(Training(str(root), every=1, leave_at=leave_at))
        losses += outcome.losses
    assert losses == uninterrupted.losses
    assert outcome.draws == uninterrupted.draws


def test_each_sample_counts_once_in_each_epoch(uninterrupted):
    ids = [one for batch in uninterrupted.samples for one in batch]
    assert sorted(ids[:SAMPLES]) == sorted(ids[SAMPLES:]) == list(range(SAMPLES))


def test_saving_changes_nothing_in_the_training(root, uninterrupted):
    often = train(Training(str(root), every=1))
    assert (often.losses, often.state, often.draws) == (
        uninterrupted.losses,
        uninterrupted.state,
        uninterrupted.draws,
    )


def test_a_save_before_the_first_step_changes_nothing(root, uninterrupted):
    """torch's get_optimizer_state_dict takes a step to have something to save: Adam then counts one too many."""

    def save_first(step, manager):
        if step == 0:
            manager.save(0)

    assert train(Training(str(root)), save_first).state == uninterrupted.state


def test_a_finished_training_says_so_and_does_nothing(root, capsys):
    train(Training(str(root)))
    capsys.readouterr()
    again = train(Training(str(root)))
    assert again.steps == []
    assert "nothing to do: 2 of 2 epochs done (step 20)" in capsys.readouterr().out
    more = train(Training(str(root), epochs=3))
    assert more.steps == list(range(20, 30))


def test_a_resume_says_so_and_how_to_start_afresh(root, capsys):
    train(Training(str(root), leave_at=7))
    capsys.readouterr()
    train(Training(str(root)))
    out = capsys.readouterr().out
    assert f"resumed step 6 from {only_checkpoint(root, 6) if list(root.glob('step_6.*')) else root}" in out
    assert "--resume never" in out


def test_saves_by_time_and_at_the_end(root):
    outcome = train(Training(str(root), every="1h"))
    assert [info.step for info in list_checkpoints(root)] == [20]
    assert [kind for kind, _ in outcome.events] == ["saved"]


def test_keeps_the_newest_only(root):
    train(Training(str(root), options={"keep": 2}))
    assert {info.step for info in list_checkpoints(root)} == {18, 20}
    assert all(verify(info.path, deep=True) for info in list_checkpoints(root))


def test_a_training_that_starts_afresh_is_the_one_that_is_gone_on_with(root, uninterrupted):
    train(Training(str(root)))
    afresh = train(Training(str(root), leave_at=7, options={"resume": "never", "keep": 2}))
    assert afresh.losses == uninterrupted.losses[:7]
    assert train(Training(str(root))).steps == list(range(6, STEPS))


def test_the_environment_is_stronger_than_the_argument(root, monkeypatch):
    train(Training(str(root), leave_at=7, options={"keep": 5}))
    monkeypatch.setenv("AIR_NB_RESUME", only_checkpoint(root, 3).name)
    assert train(Training(str(root), options={"resume": "never", "keep": 5})).steps[0] == 3
    monkeypatch.setenv("AIR_NB_RESUME", "never")
    assert train(Training(str(root), leave_at=1, options={"resume": "must"})).steps == [0]


def test_a_path_is_restored_or_nothing(root):
    train(Training(str(root), leave_at=7, options={"keep": 5}))
    path = only_checkpoint(root, 3)
    assert train(Training(str(root), leave_at=4, options={"resume": path})).steps == [3]
    flip(next(path.glob("*.distcp")))
    with pytest.raises(CheckpointDamagedError, match=path.name):
        train(Training(str(root), options={"resume": str(path)}))


def test_must_needs_a_checkpoint(root):
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint in"):
        train(Training(str(root), options={"resume": "must"}))


def test_save_and_restore_by_hand(root):
    model = a_model()
    with CheckpointManager(root, model=model) as manager:
        assert (manager.restore(), manager.latest, manager.last_save) == (None, None, None)
        manager.save(5, wait=True)
        latest, report = manager.latest, manager.last_save
    assert latest is not None
    assert report is not None
    assert (latest.step, latest.path) == (report.step, report.path) == (5, str(only_checkpoint(root, 5)))
    weights = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    with CheckpointManager(root, model=model) as manager:
        assert manager.restore() == 5
    assert torch.equal(model.weight, weights)


def test_what_is_saved_is_the_moment_of_the_save_though_training_goes_on(root):
    model = a_model()
    weights = model.weight.detach().clone()
    with CheckpointManager(root, model=model) as manager:
        for step in range(3):  # the second and third one use the memory of the first again
            with torch.no_grad():
                model.weight.copy_(weights + step)
            manager.save(step)
            with torch.no_grad():
                model.weight.fill_(-1)
        manager.wait()
        for step in range(3):
            manager.restore(only_checkpoint(root, step))
            assert torch.equal(model.weight, weights + step)


def test_a_url_is_as_good_as_a_directory():
    root = f"memory://{uuid.uuid4()}"
    train(Training(root, leave_at=7))
    assert train(Training(root)).steps == list(range(6, STEPS))


def test_stock_torch_reads_the_tensors(root):
    model = a_model()
    with CheckpointManager(root, model=model) as manager:
        manager.save(1, wait=True)
    other = nn.Linear(3, 2)
    dcp_load({"model": other.state_dict()}, checkpoint_id=only_checkpoint(root, 1))
    assert torch.equal(other.weight, model.weight)


def test_a_root_that_is_a_file_is_refused_on_first_use(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        CheckpointManager(tmp_path / "file", model=a_model()).restore()


def test_the_default_root_is_the_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CheckpointManager(model=a_model()).root == str(tmp_path / "checkpoints" / "default")
    monkeypatch.setenv("AIR_NB_RUN_NAME", "calm-tea")
    assert CheckpointManager(model=a_model()).root == str(tmp_path / "checkpoints" / "calm-tea")
    monkeypatch.setenv("AIR_NB_CHECKPOINT_ROOT", "s3://bucket/run")
    assert CheckpointManager(model=a_model()).root == "s3://bucket/run"


def test_a_checkpoint_that_was_saved_by_hand_is_not_mistaken_for_a_training(root):
    dcp_save({"x": torch.ones(1)}, storage_writer=VolumeWriter(root / "step_3"))
    with pytest.raises(CheckpointMismatchError, match="not saved by a CheckpointManager"):
        CheckpointManager(root, model=a_model()).restore()


def test_ranks_that_can_not_talk_are_told_what_to_call(root, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(CheckpointError, match="init_process_group"):
        CheckpointManager(root, model=a_model()).save(1)


def test_bad_arguments_say_what_they_are_for(root):
    manager = CheckpointManager(root, model=a_model())
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointManager(root, keep=0)
    with pytest.raises(ValueError, match="step=-1"):
        manager.save(-1)
    with pytest.raises(ValueError, match="epochs=0"):
        manager.steps([1], epochs=0)
    with pytest.raises(ValueError, match="needs a loader"):
        manager.steps()
    with pytest.raises(TypeError, match=r"air_nb\.data\.DataLoader takes the same arguments"):
        manager.steps(torch.utils.data.DataLoader(range(3)))  # type: ignore[arg-type]


def test_a_commit_is_noted_in_the_run(root, tmp_path, monkeypatch):
    monkeypatch.setenv("AIR_NB_RUN_DIR", str(tmp_path))
    train(Training(str(root), every=None))
    (line,) = (tmp_path / "checkpoints.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == STEPS
    assert json.loads(line)["path"] == str(only_checkpoint(root, STEPS))


def test_the_launcher_can_see_that_an_interrupt_leads_to_a_save(root, tmp_path, monkeypatch):
    monkeypatch.setenv("AIR_NB_RUN_DIR", str(tmp_path))
    seen = []
    train(Training(str(root)), lambda step, manager: seen.append((tmp_path / "saving_rank_0").exists()))
    assert all(seen)
    assert not (tmp_path / "saving_rank_0").exists()


@pytest.mark.parametrize("number,expected", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_lets_the_step_end_saves_and_ends_the_loop_as_it_would_have(
    root, uninterrupted, number, expected, capsys
):
    handlers = signal.getsignal(number)

    def send(step, manager):
        if step == 4:
            os.kill(os.getpid(), number)

    with pytest.raises(expected) as caught:
        train(Training(str(root)), send)
    if number == signal.SIGTERM:
        assert getattr(caught.value, "code", None) == 143
    assert "after step 5: saving" in capsys.readouterr().out
    assert signal.getsignal(number) is handlers
    second = train(Training(str(root)))
    assert second.steps[0] == 5
    assert second.losses == uninterrupted.losses[5:]


def test_a_second_interrupt_stops_at_once(root):
    def insist(step, manager):
        if step == 4:
            manager.wait()  # that of step 3
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the second one did nothing")

    with pytest.raises(KeyboardInterrupt):
        train(Training(str(root)), insist)
    assert [info.step for info in list_checkpoints(root)] == [3]


@pytest.mark.parametrize("number,expected", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_in_the_last_save_is_not_lost(root, number, expected):
    def send(event):
        os.kill(os.getpid(), number)

    model = a_model()
    manager = CheckpointManager(root, model=model, data=DataLoader([1, 2]), asynchronous=False, on_event=send)
    with pytest.raises(expected):
        list(manager.steps())
    assert [info.step for info in list_checkpoints(root)] == [2]


def test_a_termination_is_not_lost_when_the_loop_ends_for_another_reason(root):
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    manager = CheckpointManager(root, model=a_model(), data=DataLoader([1, 2, 3]))
    try:
        for _ in manager.steps():
            os.kill(os.getpid(), signal.SIGTERM)
            break
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
        manager.close()


def test_an_interrupt_that_leads_to_nothing_saved_in_time_says_so(root, monkeypatch, capsys):
    monkeypatch.setenv("AIR_NB_STOP_GRACE_S", "0.0")

    def send(step, manager):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        train(Training(str(root)), send)
    out = capsys.readouterr().out
    assert "saving (at most 0 s)" in out
    for thread in threading.enumerate():
        if thread.name == "air_nb-checkpoint":
            thread.join(30)


def test_off_the_main_thread_there_are_no_handlers_and_all_else_works(root, uninterrupted):
    results = []
    thread = threading.Thread(target=lambda: results.append(train(Training(str(root)))))
    thread.start()
    thread.join()
    assert results[0].losses == uninterrupted.losses


def test_metrics_of_a_save_tell_stall_from_duration(root):
    model = nn.Linear(1000, 1000)
    with CheckpointManager(root, model=model) as manager:
        manager.save(1)
        manager.wait()
        report = manager.last_save
    assert report is not None
    assert 0 < report.stall_s < report.seconds
    assert report.size_bytes > 4_000_000


@pytest.mark.parametrize(
    "options, prepared",
    [
        ({"every": 5}, True),
        ({"every": "1h"}, True),
        ({"every": 5, "asynchronous": False}, False),
        ({}, False),
    ],
)
def test_memory_for_copies_is_there_after_one_step_if_they_will_be_made(root, options, prepared):
    gc.collect()  # what other tests have left is not to go while memory is measured
    model = nn.Linear(4000, 1000)
    optimizer = torch.optim.Adam(model.parameters())
    process = psutil.Process()
    grown = {}
    with CheckpointManager(root, model=model, optimizer=optimizer, data=DataLoader(range(4)), **options) as manager:
        for step, _ in manager.steps():
            for thread in threading.enumerate():
                if thread.name == "air_nb-host-memory":
                    thread.join(60)
            grown[step] = process.memory_info().rss
            if step == 0:
                model(torch.ones(2, 4000)).sum().backward()
                optimizer.step()
                grown[0] = process.memory_info().rss
            if step == 2:
                break
    assert (grown[2] - grown[0] > 0.8 * 48e6) == prepared


def test_preparing_never_makes_a_training_fail(root):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["odd"] = object()  # which no save takes
    with CheckpointManager(root, model=model, optimizer=optimizer, data=DataLoader(range(4)), every=3) as manager:
        steps = manager.steps()
        assert [next(steps)[0] for _ in range(3)] == [0, 1, 2]
        with pytest.raises(CheckpointError, match="odd"):
            next(steps)


def test_an_event_handler_that_fails_fails_no_save(root, caplog):
    def raise_(event):
        raise OSError(event.kind)

    with CheckpointManager(root, model=a_model(), on_event=raise_) as manager:
        manager.save(1, wait=True)
    assert "on_event failed" in caplog.text
    assert len(list_checkpoints(root)) == 1


class Drawing:
    """A loader that draws from the model's generator when it begins and for each batch, as torch's own does."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        torch.rand(1)
        return self._batches()

    def _batches(self):
        while self.position < 5:
            self.position += 1
            yield torch.rand(2)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("leave_at", [2, 5, 7])
def test_a_loader_that_draws_random_numbers_when_it_begins_goes_on_as_if_it_had_not(root, leave_at):
    def go(root, leave_at=None):
        torch.manual_seed(3)
        seen = []
        with CheckpointManager(root, model=a_model(), data=Drawing(), every=1) as manager:
            for step, batch in manager.steps(epochs=2):
                if step == leave_at:
                    break
                seen.append((batch + torch.rand(1)).tolist())
        return seen

    expected = go(root.with_name("uninterrupted"))
    assert go(root, leave_at) + go(root) == expected


def test_a_data_set_that_changed_is_refused_before_anything_is_touched(root):
    model = a_model()
    with CheckpointManager(root, model=model, data=DataLoader(range(8), seed=1, shuffle=True)) as manager:
        next(manager.steps())
        manager.save(1, wait=True)
    with torch.no_grad():
        model.weight.zero_()
    for loader in (DataLoader(range(8), seed=2, shuffle=True), DataLoader(range(9), seed=1, shuffle=True)):
        with pytest.raises(DataError, match="go to the position in the data"):
            CheckpointManager(root, model=model, data=loader).restore()
        assert not model.weight.any()


def test_a_training_that_starts_afresh_starts_a_used_loader_afresh(root):
    loader = DataLoader(range(4), seed=1, shuffle=True)
    for _ in range(2):
        with CheckpointManager(root, model=a_model(), data=loader, resume="never") as manager:
            assert [step for step, _ in manager.steps(epochs=2)] == list(range(8))


def test_saves_follow_the_clock(root):
    seen = []

    def wait_in_step_5(step, manager):
        seen.append(step)
        if step == 5:
            time.sleep(0.6)

    train(Training(str(root), every="0.5s", epochs=1, options={"keep": 20}), wait_in_step_5)
    steps = [info.step for info in list_checkpoints(root)]
    assert 6 in steps
    assert 10 in steps
