"""The state of an optimizer by names of parameters: taken apart, compared with a checkpoint, put back.

Only the public ``state_dict`` and ``load_state_dict`` of the optimizer are used, and nothing is initialised on the way:
torch's ``get_optimizer_state_dict`` takes a step to make a state where there is none yet, after which Adam counts one
step too many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from air_nb.checkpoint.tensors import Target
from air_nb.checkpoint.values import freeze, thaw

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["OptimizerPart", "differences", "parameter_names"]

# What torch.compile and activation checkpointing put between a module and its name.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
_SHOWN = 8


class OptimizerPart:
    """One optimizer.

    Args:
        name: What it is called in the checkpoint.
        optimizer: The optimizer.
        names: Names of the model's parameters.
    """

    def __init__(self, name: str, optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self._name = name
        self._optimizer = optimizer
        self._model_names = names

    def collect(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Take the state apart.

        Args:
            tensors: Its tensors are added here, by name.

        Returns:
            The rest, frozen.

        Raises:
            TypeError: A part can't be saved so that it could be restored.
        """
        state = self._optimizer.state_dict()
        names = self._names()
        parameters = self._parameters()
        return {
            "state": {
                names[index]: self._freeze(names[index], parameters.get(names[index]), values, tensors)
                for index, values in state["state"].items()
            },
            "groups": [self._freeze_group(group, names) for group in state["param_groups"]],
        }

    def _freeze(
        self, parameter_name: str, like: torch.Tensor | None, values: Any, tensors: dict[str, torch.Tensor]
    ) -> Any:
        def keep(tensor: torch.Tensor, key: str) -> str:
            self._must_shard_alike(tensor, like, key)
            if key in tensors:
                msg = f"two values are called {key}"
                raise TypeError(msg)
            tensors[key] = tensor
            return key

        return freeze(values, f"{self._name}.state.{parameter_name}", keep)

    def _must_shard_alike(self, tensor: torch.Tensor, like: torch.Tensor | None, key: str) -> None:
        """Refuse what could not be dealt to another number of ranks by what the parameter says."""
        if _is_sharded_like(tensor.shape, like) != isinstance(tensor, DTensor):
            shape = None if like is None else tuple(like.shape)
            msg = (
                f"{key} {tuple(tensor.shape)} is not sharded as its parameter {shape} is: state of {self._kind()} "
                "can't be restored on another number of ranks"
            )
            raise TypeError(msg)

    def _freeze_group(self, group: Mapping[str, Any], names: Mapping[Any, str]) -> dict[str, Any]:
        values = {key: value for key, value in group.items() if key != "params"}
        return {
            "params": [names[index] for index in group["params"]],
            "values": freeze(values, f"{self._name}.param_groups"),
        }

    def targets(self, saved: Mapping[str, Any], metadata: Metadata) -> tuple[dict[str, Target], list[str]]:
        """What of a checkpoint is to be loaded, and what speaks against it.

        Args:
            saved: What ``collect`` returned then.
            metadata: Torch's description of the tensors.
        """
        there = [group["params"] for group in saved["groups"]]
        here = self._groups()
        problems = differences(f"parameters of {self._name}", chain.from_iterable(here), chain.from_iterable(there))
        if not problems and here != there:
            problems = [
                (
                    f"{self._name} has its parameters in other groups or in another order: groups of "
                    f"{[len(group) for group in there]} there, of {[len(group) for group in here]} here"
                )
            ]
        if problems:
            return {}, problems
        targets: dict[str, Target] = {}
        parameters = self._parameters()
        for parameter_name, values in saved["state"].items():
            like = parameters.get(parameter_name)
            for key in _keys(values):
                entry = metadata.state_dict_metadata[key]
                assert isinstance(entry, TensorStorageMetadata)
                whole = like if like is not None and _is_sharded_like(entry.size, like) else torch.empty(entry.size)
                targets[key] = Target(whole, entry.properties.dtype)
        return targets, []

    def apply(self, saved: Mapping[str, Any], targets: Mapping[str, Target]) -> None:
        """Put a loaded state into the optimizer."""
        numbers = {name: index for index, name in self._names().items()}
        state = {
            numbers[name]: thaw(values, lambda key: targets[key].whole()) for name, values in saved["state"].items()
        }
        groups = [
            {**thaw(group["values"]), "params": [numbers[name] for name in group["params"]]}
            for group in saved["groups"]
        ]
        for group, live in zip(groups, self._optimizer.param_groups, strict=True):
            for key, value in group.items():
                # A learning rate in a tensor belongs on the device where the optimizer reads it.
                if isinstance(value, torch.Tensor) and isinstance(live.get(key), torch.Tensor):
                    group[key] = value.to(live[key].device)
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        self._undo_casts(state)

    def _undo_casts(self, state: Mapping[Any, Any]) -> None:
        """Give back types that ``load_state_dict`` has made those of the parameters (float32 moments of bfloat16)."""
        parameters = self._parameters()
        for index, name in self._names().items():
            live, wanted = self._optimizer.state.get(parameters[name]), state.get(index)
            if not isinstance(live, dict) or not isinstance(wanted, dict):
                continue
            for key, value in wanted.items():
                now = live.get(key)
                if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                    live[key] = value.to(now.device)

    def _kind(self) -> str:
        return type(self._optimizer).__name__

    def _names(self) -> dict[Any, str]:
        """Names by the numbers that the optimizer's own state gives: the order of its groups."""
        every = [one for group in self._optimizer.param_groups for one in group["params"]]
        return {index: self._model_names.get(one, f"#{index}") for index, one in enumerate(every)}

    def _parameters(self) -> dict[str, torch.Tensor]:
        every = [one for group in self._optimizer.param_groups for one in group["params"]]
        return dict(zip(self._names().values(), every, strict=True))

    def _groups(self) -> list[list[str]]:
        names = iter(self._names().values())
        return [[next(names) for _ in group["params"]] for group in self._optimizer.param_groups]


def _keys(frozen: Any) -> list[str]:
    """Names of the tensors that were taken out of a frozen value."""
    found: list[str] = []

    def note(key: str) -> torch.Tensor:
        found.append(key)
        return torch.empty(0)

    thaw(frozen, note)
    return found


def _is_sharded_like(size: Sequence[int], like: torch.Tensor | None) -> bool:
    return isinstance(like, DTensor) and tuple(size) == tuple(like.shape)


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """Parameters by identity, with the names that torch.distributed.checkpoint gives them."""
    return {parameter: _clean(model, name) for name, parameter in model.named_parameters()}


def _clean(model: nn.Module, name: str) -> str:
    kept = []
    module: Any = model
    for part in name.split("."):
        is_wrapped = part in _WRAPPERS or (part == "module" and isinstance(module, DistributedDataParallel))
        if not is_wrapped:
            kept.append(part)
        module = getattr(module, part, None)
    return ".".join(kept)


def differences(what: str, here: Iterable[str], there: Iterable[str]) -> list[str]:
    """What is only on one side, in words."""
    ours, theirs = set(here), set(there)
    return [
        f"{what}, {where}: {_listed(names)}"
        for where, names in (("missing in the checkpoint", ours - theirs), ("only in the checkpoint", theirs - ours))
        if names
    ]


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more
