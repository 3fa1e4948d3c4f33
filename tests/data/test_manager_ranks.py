"""A training on several ranks that goes on, on as many or on another number of them: DDP and FSDP2 over gloo."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from air_nb.checkpoint import CheckpointManager, list_checkpoints
from air_nb.data import DataLoader
from air_nb.errors import CheckpointError, CheckpointMismatchError
from tests.support.ranks import RanksFailedError, run_ranks
from tests.support.trainings import SAMPLES, Training, build, full_state, only_checkpoint, train

pytestmark = pytest.mark.usefixtures("forkserver")

STEPS = 20


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


def run(world_size, root, kind, **changes):
    return run_ranks(world_size, train, Training(str(root), kind, **changes))


def global_batches(outcomes):
    """Ids of each step, over all ranks in their order."""
    return [[one for ids in step for one in ids] for step in zip(*(one.samples for one in outcomes), strict=True)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_resumed_on_as_many_ranks_is_uninterrupted_bit_for_bit(root, tmp_path, kind):
    uninterrupted = run(2, tmp_path / "other", kind)
    first = run(2, root, kind, leave_at=7)
    second = run(2, root, kind)
    for rank in range(2):
        assert second[rank].steps == list(range(6, STEPS))
        assert first[rank].losses[:6] + second[rank].losses == uninterrupted[rank].losses
        assert second[rank].state == uninterrupted[rank].state
        assert second[rank].draws == uninterrupted[rank].draws
    assert second[0].draws != second[1].draws


def state_after_restore(root, kind):
    parts = build(kind)
    manager = CheckpointManager(
        root, model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler, data=parts.loader
    )
    step = manager.restore()
    draw, buffers = torch.rand(1).item(), [buffer.tolist() for buffer in parts.model.buffers()]
    manager.close()
    return step, full_state(parts.model, parts.optimizer, buffers=False), parts.scheduler.last_epoch, draw, buffers


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("saved_by,restored_by", [(1, 4), (2, 3), (4, 2), (3, 1)])
def test_model_and_optimizer_are_the_same_on_any_number_of_ranks(root, kind, saved_by, restored_by):
    run_ranks(saved_by, save_at_4, str(root), kind)
    same = run_ranks(saved_by, state_after_restore, str(root), kind)
    other = run_ranks(restored_by, state_after_restore, str(root), kind)
    assert {one[:3] for one in same + other} == {(4, same[0][1], 4)}
    both = min(saved_by, restored_by)
    assert [one[3] for one in other[:both]] == [one[3] for one in same[:both]]
    assert len({one[3] for one in other}) == restored_by  # ranks that were not there have numbers of their own
    assert len({repr(one[4]) for one in same}) == saved_by  # buffers that differed come back to each,
    assert all(one[4] == same[0][4] for one in other)  # or are those of rank 0


def save_at_4(root, kind):
    parts = build(kind)
    manager = CheckpointManager(
        root, model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler, data=parts.loader
    )
    for step in range(4):
        parts.optimizer.zero_grad()
        parts.model(torch.randn(4, 5, dtype=torch.float64)).sum().backward()
        parts.optimizer.step()
        parts.scheduler.step()
        del step
    manager.save(4, wait=True)
    manager.close()


def test_what_ddp_saved_can_be_sharded_and_back(root):
    run_ranks(2, save_at_4, str(root), "ddp")
    ddp = run_ranks(2, state_after_restore, str(root), "ddp")
    assert {one[1] for one in run_ranks(3, state_after_restore, str(root), "fsdp")} == {ddp[0][1]}


def test_samples_go_on_exactly_on_other_numbers_of_ranks(root, tmp_path):
    uninterrupted = run(2, tmp_path / "other", "ddp")
    batches = global_batches(run(2, root, "ddp", leave_at=4))[:3]
    batches += global_batches(run(4, root, "ddp", leave_at=10))[:6]
    batches += global_batches(run(1, root, "ddp"))
    assert batches == global_batches(uninterrupted)
    ids = [one for batch in batches for one in batch]
    assert sorted(ids[:SAMPLES]) == sorted(ids[SAMPLES:]) == list(range(SAMPLES))


class Documents:
    """Items of 0 to 4 examples."""

    def __len__(self):
        return 12

    def examples(self, index, start=0):
        for number in range(start, index % 5):
            yield index, number


def read_documents(root, leave_at, every):
    batch_size = 12 // dist.get_world_size() // 2
    loader = DataLoader(Documents(), batch_size=batch_size, shuffle=True, seed=1, num_workers=0)
    manager = CheckpointManager(root, model=nn.Linear(1, 1), data=loader, every=every)
    seen = {}
    for step, batch in manager.steps(epochs=2):
        if step == leave_at:
            break
        seen[step] = [tuple(pair) for pair in torch.stack(batch, 1)[loader.valid].tolist()]
    manager.close()
    return seen


def test_items_of_many_examples_go_on_exactly_on_other_numbers_of_ranks(root):
    consumed = []
    for world_size, leave_at in ((2, 3), (3, 5), (1, None)):
        outcomes = run_ranks(world_size, read_documents, str(root), leave_at, 1)
        (step, *_) = [info.step for info in list_checkpoints(root)]
        consumed += [pair for seen in outcomes for at, batch in seen.items() if at < step for pair in batch]
    expected = [(index, number) for index in range(12) for number in range(index % 5)]
    assert sorted(consumed) == sorted(expected * 2)


def test_new_ranks_are_mentioned(root, tmp_path):
    run_ranks(1, save_at_4, str(root), "ddp")
    (first, _) = run_ranks(2, said_by_restore, str(root), str(tmp_path))
    assert "saved by 1 of the 2 ranks: the random numbers of the others are derived" in first


def said_by_restore(root, directory):
    path = Path(directory) / f"said_{dist.get_rank()}"
    import contextlib

    with path.open("w") as file, contextlib.redirect_stdout(file):
        state_after_restore(root, "ddp")
    return path.read_text()


def stop_by_signal(root, number, on_rank, at_step):
    def send(step, manager):
        if step == at_step and dist.get_rank() == on_rank:
            os.kill(os.getpid(), number)

    try:
        train(Training(root, "ddp"), send)
    except BaseException as error:  # noqa: BLE001 - its kind is the result
        return type(error).__name__
    return None


@pytest.mark.parametrize("number,name", [(signal.SIGTERM, "SystemExit"), (signal.SIGINT, "KeyboardInterrupt")])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(root, number, name):
    assert run_ranks(3, stop_by_signal, str(root), number, 1, 4) == [name] * 3
    (newest, *_) = list_checkpoints(root)
    assert newest.step is not None
    assert newest.step >= 5
    assert train(Training(str(root), "plain")).steps[0] == newest.step


class Counted:
    """A loader of somebody else's, that knows only this rank's position."""

    def __init__(self, n_batches):
        self.n_batches = n_batches
        self.position = 0

    def __iter__(self):
        while self.position < self.n_batches:
            self.position += 1
            yield self.position + 100 * (dist.get_rank() if dist.is_initialized() else 0)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def count(root, n_batches, leave_at, unequal=False):
    loader = Counted(n_batches + (dist.get_rank() if unequal else 0))
    model = nn.Linear(2, 2)
    manager = CheckpointManager(root, model=model, data=loader, every=2)
    seen = []
    for step, batch in manager.steps(epochs=2):
        if step == leave_at:
            break
        seen.append(batch)
    manager.close()
    return seen


def test_any_loader_with_a_state_goes_on_on_as_many_ranks(root):
    first = run_ranks(2, count, str(root), 5, 7)
    second = run_ranks(2, count, str(root), 5, None)
    for rank in range(2):
        assert first[rank][:6] + second[rank] == [one + 100 * rank for one in (1, 2, 3, 4, 5)] * 2


def test_a_loader_that_knows_only_its_own_rank_refuses_another_number_of_them(root):
    run_ranks(2, count, str(root), 5, 3)
    with pytest.raises(CheckpointMismatchError, match="saved by 2 ranks") as caught:
        count(str(root), 5, None)
    assert "Counted" in str(caught.value)


def test_ranks_with_unequal_numbers_of_batches_are_told_instead_of_hanging(root):
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, count, str(root), 5, None, True)
    for text in caught.value.tracebacks.values():
        assert "different numbers of batches" in text


class Tally:
    """State of this rank's own."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def tallies(root, restore):
    rank = dist.get_rank() if dist.is_initialized() else 0
    equal, different = Tally("equal"), Tally(f"of rank {rank}")
    state = {"equal": equal, "different": different} if restore != "equal" else {"equal": equal}
    with CheckpointManager(root, model=nn.Linear(1, 1), state=state) as manager:
        if restore:
            equal.value = different.value = "?"
            manager.restore()
        else:
            manager.save(1)
    return equal.value, different.value


def test_state_of_ranks_comes_back_to_each(root):
    run_ranks(2, tallies, str(root), "")
    assert run_ranks(2, tallies, str(root), "all") == [("equal", "of rank 0"), ("equal", "of rank 1")]


def test_state_that_is_the_same_on_all_ranks_goes_to_any_number_and_other_state_does_not(root):
    run_ranks(2, tallies, str(root), "")
    assert [one[0] for one in run_ranks(3, tallies, str(root), "equal")] == ["equal"] * 3
    with pytest.raises(RanksFailedError, match=r"state\.different was different on each of the 2 ranks"):
        run_ranks(3, tallies, str(root), "all")


def other_models(root):
    width = 2 + dist.get_rank()
    manager = CheckpointManager(root, model=nn.Linear(width, 2))
    try:
        manager.save(1, wait=True)
    except CheckpointError as error:
        return str(error)
    return None


def test_ranks_with_different_models_are_refused(root):
    for message in run_ranks(2, other_models, str(root)):
        assert "ranks [1] have other tensors" in message
    assert list_checkpoints(root) == []


def unsavable_on_one_rank(root):
    tally = Tally(open if dist.get_rank() == 1 else 3)
    manager = CheckpointManager(root, model=nn.Linear(1, 1), state={"tally": tally})
    try:
        manager.save(1)
    except CheckpointError as error:
        return str(error), type(error.__cause__).__name__
    return None


def test_what_one_rank_can_not_save_is_an_error_on_all_that_names_it(root):
    (first, first_cause), (second, second_cause) = run_ranks(2, unsavable_on_one_rank, str(root))
    assert first == second
    assert "on rank 1" in first
    assert "state.tally.value" in first
    assert (first_cause, second_cause) == ("NoneType", "TypeError")


def only_rank_0_saves(root):
    manager = CheckpointManager(root, model=nn.Linear(1, 1), timeout_s=2)
    try:
        if dist.get_rank() == 0:
            manager.save(7)
        else:
            manager._connect()
            import time

            time.sleep(4)
    except CheckpointError as error:
        return str(error)
    return None


def test_a_rank_that_does_not_come_is_named_with_what_the_others_do(root):
    message, _ = run_ranks(2, only_rank_0_saves, str(root))
    assert "could not save step 7" in message
    assert "time limit 2 s" in message
    assert "Ranks 1" in message or "Rank 1" in message


def shards(root):
    torch.manual_seed(0)
    model = nn.Linear(1, 3)  # 3 rows on 4 ranks: one has none
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    with CheckpointManager(root, model=model, optimizer=optimizer) as manager:
        manager.save(1)
    before = full_state(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().zero_()
    with CheckpointManager(root, model=model, optimizer=optimizer) as manager:
        manager.restore()
    return before == full_state(model, optimizer)


def test_more_ranks_than_rows(root):
    assert run_ranks(4, shards, str(root)) == [True] * 4
    names = [path.name for path in only_checkpoint(root, 1).glob("rank_*")]
    assert sorted(names) == [f"rank_{rank}.state" for rank in range(4)]


def with_group_of(root, backend):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{root}.store", rank=rank, world_size=world_size)
    with CheckpointManager(root, model=nn.Linear(1, 1)) as manager:
        manager.save(1)
    with CheckpointManager(root, model=nn.Linear(1, 1)) as manager:
        return manager.restore()


def test_a_process_group_of_one(root):
    assert run_ranks(1, with_group_of, str(root), "gloo") == [1]


def test_a_group_that_can_only_talk_between_gpus(root):
    """As one of nccl alone: torch's own async_save refuses it."""
    assert run_ranks(2, with_group_of, str(root), "cuda:gloo") == [1, 1]
