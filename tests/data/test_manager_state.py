"""What belongs to a training besides weights, and what can't be saved: restored, or refused at once by name."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from air_nb.checkpoint import CheckpointManager
from air_nb.errors import CheckpointError, CheckpointMismatchError


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


def model_of(seed, width=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))


def step(model, *optimizers):
    model(torch.randn(2, 3)).pow(2).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def save(root, **parts):
    with CheckpointManager(root, **parts) as manager:
        manager.save(1)


def restore(root, **parts):
    with CheckpointManager(root, **parts) as manager:
        assert manager.restore() == 1


def assert_equal(first, second):
    """Equal, with the types, down to tensors."""
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_equal(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_equal(one, other)
    else:
        assert first == second


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD with momentum and dampening": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, dampening=0.5
    ),
    "Adam amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "AdamW with lr in a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5, centered=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_optimizers_go_on_as_if_nothing_had_been(root, name, steps):
    def take(model, optimizer):
        torch.manual_seed(5)
        rows = torch.randn(2, 3)

        def loss():
            optimizer.zero_grad()
            value = model(rows).pow(2).sum()
            value.backward()
            return value

        optimizer.step(loss)

    model = model_of(1)
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(steps):
        take(model, optimizer)
    save(root, model=model, optimizer=optimizer)
    other = model_of(2)
    other_optimizer = OPTIMIZERS[name](other.parameters())
    restore(root, model=other, optimizer=other_optimizer)
    assert_equal(other_optimizer.state_dict(), optimizer.state_dict())
    take(model, optimizer)
    take(other, other_optimizer)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_tied_weights_stay_tied(root):
    def tied(seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        optimizer = torch.optim.AdamW(model.parameters())
        model["head"](model["embed"](torch.tensor([1, 2]))).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = tied(1)
    save(root, model=model, optimizer=optimizer)
    other, other_optimizer = tied(2)
    restore(root, model=other, optimizer=other_optimizer)
    assert other["head"].weight is other["embed"].weight
    assert torch.equal(other["head"].weight, model["head"].weight)
    assert_equal(other_optimizer.state_dict(), optimizer.state_dict())


def test_empty_groups_groups_of_their_own_and_a_learning_rate_changed_by_hand(root):
    def grouped(model):
        return torch.optim.AdamW(
            [
                {"params": [model[0].weight], "lr": 0.5},
                {"params": [], "lr": 0.25},
                {"params": [model[0].bias, *model[1].parameters()], "weight_decay": 0.0, "name": "rest"},
            ]
        )

    model = model_of(1)
    optimizer = grouped(model)
    LambdaLR(optimizer, lambda epoch: 0.5)  # sets initial_lr
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.125
    optimizer.param_groups[2]["mine"] = [1, "two"]
    save(root, model=model, optimizer=optimizer)
    other = model_of(2)
    other_optimizer = grouped(other)
    restore(root, model=other, optimizer=other_optimizer)
    assert_equal(other_optimizer.state_dict(), optimizer.state_dict())
    assert other_optimizer.param_groups[0]["lr"] == 0.125
    assert other_optimizer.param_groups[0]["initial_lr"] == 0.5


def test_parameters_that_were_never_stepped_have_no_state_afterwards_either(root):
    model = model_of(1)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    save(root, model=model, optimizer=optimizer)
    other = model_of(2)
    other_optimizer = torch.optim.AdamW(other.parameters())
    step(other, other_optimizer)
    restore(root, model=other, optimizer=other_optimizer)
    assert_equal(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])
    assert len(other_optimizer.state_dict()["state"]) == 3


def test_several_optimizers_and_schedulers(root):
    def parts(seed):
        model = model_of(seed)
        optimizers = {
            "first": torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
            "second": torch.optim.AdamW(model[1].parameters(), lr=0.2),
        }
        schedulers = [LambdaLR(one, lambda epoch: 0.9**epoch) for one in optimizers.values()]
        return model, optimizers, schedulers

    model, optimizers, schedulers = parts(1)
    step(model, *optimizers.values())
    schedulers[1].step()
    save(root, model=model, optimizer=optimizers, scheduler=schedulers)
    other, other_optimizers, other_schedulers = parts(2)
    restore(root, model=other, optimizer=other_optimizers, scheduler=other_schedulers)
    for name in optimizers:
        assert_equal(other_optimizers[name].state_dict(), optimizers[name].state_dict())
    assert [one.last_epoch for one in other_schedulers] == [0, 1]


SCHEDULERS = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "MultiStepLR": lambda optimizer: MultiStepLR(optimizer, [2, 2, 4]),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=20),
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
    "CosineAnnealingWarmRestarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, lambda epoch: 0.1), MultiStepLR(optimizer, [3])], milestones=[2]
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_as_if_nothing_had_been(root, name):
    def parts():
        model = model_of(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, SCHEDULERS[name](optimizer)

    def go(optimizer, scheduler, n_steps):
        rates = []
        for _ in range(n_steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    model, optimizer, scheduler = parts()
    go(optimizer, scheduler, 3)
    save(root, model=model, optimizer=optimizer, scheduler=scheduler)
    rates = go(optimizer, scheduler, 6)
    model, optimizer, scheduler = parts()
    restore(root, model=model, optimizer=optimizer, scheduler=scheduler)
    assert go(optimizer, scheduler, 6) == rates


class WithLambda(LambdaLR):
    """A scheduler that keeps a function where its state is."""

    def state_dict(self):
        return {**super().state_dict(), "shape": lambda epoch: epoch}


def test_a_scheduler_whose_state_is_code_is_refused_when_it_is_saved(root):
    model = model_of(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = WithLambda(optimizer, lambda epoch: 1.0)
    with pytest.raises(CheckpointError, match=r"scheduler\.shape is a builtins\.function"):
        save(root, model=model, optimizer=optimizer, scheduler=scheduler)
    assert not root.exists() or not list(root.glob("step_*"))


class Extra:
    """Anything with a state."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_state_that_is_no_tensor_comes_back(root):
    value = {
        "best": np.float64(0.1),
        "seen": {3, 4},
        "history": [(1, 0.5), (2, None)],
        "counts": collections.Counter("aab"),
        "ema": torch.arange(3.0),
        "text": "ü",
    }
    extra = Extra(value)
    save(root, model=model_of(1), state={"extra": extra})
    value["history"].append("later")  # type: ignore[attr-defined]
    other = Extra(None)
    restore(root, model=model_of(2), state={"extra": other})
    assert torch.equal(other.value.pop("ema"), torch.arange(3.0))
    del value["ema"]
    value["history"] = [(1, 0.5), (2, None)]
    assert other.value == value
    assert type(other.value["best"]) is np.float64


def test_a_second_module_is_saved_as_the_model_is(root):
    average = torch.optim.swa_utils.AveragedModel(model_of(3))
    save(root, model=model_of(1), state={"average": average})
    other = torch.optim.swa_utils.AveragedModel(model_of(4))
    restore(root, model=model_of(2), state={"average": other})
    assert_equal(dict(other.state_dict()), dict(average.state_dict()))


class WithExtraState(nn.Linear):
    """A module whose state is not only tensors."""

    calls = 0

    def get_extra_state(self):
        return {"calls": self.calls, "version": "v2"}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_extra_state_of_modules(root):
    model = WithExtraState(2, 2)
    model.calls = 7
    save(root, model=model)
    other = WithExtraState(2, 2)
    restore(root, model=other)
    assert other.calls == 7


def test_a_compiled_model_has_the_names_of_the_plain_one(root):
    model = model_of(1)
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters())
    step(compiled, optimizer)
    save(root, model=compiled, optimizer=optimizer)
    other = model_of(2)
    other_optimizer = torch.optim.AdamW(other.parameters())
    restore(root, model=other, optimizer=other_optimizer)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))
    assert_equal(other_optimizer.state_dict(), optimizer.state_dict())


def test_float32_moments_of_a_bfloat16_model_stay_float32(root):
    """Optimizer.load_state_dict makes them bfloat16."""
    model = model_of(1).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-7
    save(root, model=model, optimizer=optimizer)
    other = model_of(2).to(torch.bfloat16)
    other_optimizer = torch.optim.AdamW(other.parameters())
    restore(root, model=other, optimizer=other_optimizer)
    assert_equal(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def test_all_that_does_not_fit_is_listed_at_once(root):
    model = model_of(1)
    save(root, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    other = nn.Sequential(collections.OrderedDict({"0": nn.Linear(3, 4, bias=False), "2": nn.Linear(4, 2).double()}))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda epoch: 1.0)
    with pytest.raises(CheckpointMismatchError) as caught:
        restore(root, model=other, optimizer=optimizer, scheduler=scheduler, state={"extra": Extra(1)})
    text = str(caught.value)
    assert "model, missing in the checkpoint: 2.bias, 2.weight" in text
    assert "model, only in the checkpoint: 0.bias, 1.bias, 1.weight" in text
    assert "parameters of optimizer, missing in the checkpoint: 2.bias, 2.weight" in text
    assert "it has no scheduler" in text
    assert "it has no state.extra" in text


def test_another_type_of_weights_does_not_fit(root):
    save(root, model=model_of(1))
    with pytest.raises(CheckpointMismatchError, match=r"0\.weight is float32 \[4, 3\] there, float64 \[4, 3\] here"):
        restore(root, model=model_of(2).double())


def test_parameters_in_another_order_do_not_fit(root):
    model = model_of(1)
    save(root, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    other = model_of(2)
    optimizer = torch.optim.SGD(list(other.parameters())[::-1], lr=0.1)
    with pytest.raises(CheckpointMismatchError, match="in other groups or in another order"):
        restore(root, model=other, optimizer=optimizer)


def test_what_the_checkpoint_has_besides_is_mentioned(root, capsys):
    model = model_of(1)
    save(root, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), state={"extra": Extra(1)})
    restore(root, model=model_of(2))
    assert "not restored, as the manager was not given it: optimizer, state.extra" in capsys.readouterr().out


@pytest.mark.parametrize(
    "parts,message",
    [
        ({"scheduler": object()}, "scheduler is a object without state_dict"),
        ({"state": {"x": 3}}, r"state\.x is a int without state_dict"),
        ({"data": [1, 2]}, "data is a list without state_dict"),
        ({"optimizer": [3]}, r"optimizer\.0 is a int without state_dict"),
    ],
)
def test_what_has_no_state_is_refused_at_once(root, parts, message):
    with pytest.raises(TypeError, match=message):
        CheckpointManager(root, **parts)


def test_names_with_dots_are_refused(root):
    with pytest.raises(ValueError, match=r"'a\.b'"):
        CheckpointManager(root, state={"a.b": Extra(1)})
