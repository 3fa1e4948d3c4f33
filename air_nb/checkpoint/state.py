"""What a training consists of: taken apart for a checkpoint, compared with one, and put back.

Tensors of models and optimizers go through torch.distributed.checkpoint by their qualified names, each byte saved once
and resharded when it is loaded. Everything else is small: what is the same on all ranks is saved once, what belongs to
a rank is saved by that rank.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from air_nb.checkpoint.host_copy import local_part
from air_nb.checkpoint.optimizers import OptimizerPart, differences, parameter_names
from air_nb.checkpoint.tensors import Target
from air_nb.checkpoint.values import freeze, thaw
from air_nb.data.loader import DataLoader
from air_nb.errors import CheckpointMismatchError

__all__ = ["Saved", "Snapshot", "TrainingState"]

_DATA = "data"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A training at one moment, on one rank.

    Attributes:
        tensors: The live tensors of models and optimizers, by name.
        shared: What is no such tensor, and the same on all ranks; frozen.
        own: What is this rank's: of the loader and of the objects in ``state``; frozen.
        data: State of a loader that no number of ranks has a part in (JSON); None without one.
    """

    tensors: dict[str, torch.Tensor]
    shared: dict[str, Any]
    own: dict[str, Any]
    data: Any = None

    def digest(self) -> str:
        """The same on two ranks if they have the same tensors, as far as names and shapes tell."""
        described = sorted(f"{name} {_described(tensor.shape, tensor.dtype)}" for name, tensor in self.tensors.items())
        return hashlib.sha256("\n".join(described).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint without its tensors, as one rank sees it.

    Attributes:
        metadata: Torch's description of the tensors.
        shared: See ``Snapshot``.
        own: What this rank saved, or, if there were not as many ranks as now, what rank 0 did.
        alike: Names of what was the same on all ranks though each saved it.
        data: See ``Snapshot``.
        world_size: Number of ranks that saved it.
        is_same_grid: Whether there are as many now.
    """

    metadata: Metadata
    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    alike: frozenset[str]
    data: Any
    world_size: int
    is_same_grid: bool


class TrainingState:
    """The objects of a training.

    Args:
        model: The model, wrapped or sharded as it is trained; None if there is none to save.
        optimizer: Its optimizer, or several, in a list or by name.
        scheduler: Its scheduler, likewise.
        data: The loader; anything with ``state_dict`` and ``load_state_dict``.
        state: Further objects with both, by name; modules are saved as the model is.

    Raises:
        TypeError: One of them can't be saved.
        ValueError: A name has a dot in it.
    """

    def __init__(
        self, *, model: nn.Module | None, optimizer: Any, scheduler: Any, data: Any, state: Mapping[str, Any] | None
    ) -> None:
        optimizers = _by_name("optimizer", optimizer)
        self._schedulers = _by_name("scheduler", scheduler)
        extras = _by_name("state", dict(state or {}))
        modules = {name: extra for name, extra in extras.items() if isinstance(extra, nn.Module)}
        self._models = ({} if model is None else {"model": model}) | modules
        self._extras = {name: extra for name, extra in extras.items() if name not in modules}
        self.data: Any = None
        if data is not None:
            self.set_data(data)
        for name, one in {**self._models, **optimizers, **self._schedulers, **self._extras}.items():
            _must_have_state(name, one)
        for name, module in self._models.items():
            _refuse_flat_shards(name, module)
        names = {} if model is None else parameter_names(model)
        self._optimizers = {name: OptimizerPart(name, one, names) for name, one in optimizers.items()}

    @property
    def is_on_any_grid(self) -> bool:
        """Whether the loader's state means the same on any number of ranks: ours, JSON and equal on all."""
        return isinstance(self.data, DataLoader)

    def set_data(self, loader: Any) -> None:
        """Save this loader, too.

        Raises:
            TypeError: It has no state.
        """
        _must_have_state(_DATA, loader)
        self.data = loader

    def collect(self) -> Snapshot:
        """Take the training apart. Collective if the loader's ``state_dict`` is: every rank calls.

        Raises:
            TypeError: A part can't be saved so that it could be restored.
        """
        data = None if self.data is None else self.data.state_dict()  # first: it may be collective
        snapshot = Snapshot({}, {}, {}, data if self.is_on_any_grid else None)
        if not self.is_on_any_grid and self.data is not None:
            snapshot.own[_DATA] = freeze(data, _DATA)
        for name, model in self._models.items():
            state = get_model_state_dict(model)
            snapshot.tensors.update(_model_tensors(name, state))
            others = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
            snapshot.shared[name] = freeze(others, name)
        for name, optimizer in self._optimizers.items():
            snapshot.shared[name] = optimizer.collect(snapshot.tensors)
        for name, scheduler in self._schedulers.items():
            snapshot.shared[name] = freeze(scheduler.state_dict(), name)
        for name, extra in self._extras.items():
            snapshot.own[name] = freeze(extra.state_dict(), name)
        return snapshot

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors, as in ``collect``, which is collective; it also says what can't be saved."""
        tensors: dict[str, torch.Tensor] = {}
        for name, model in self._models.items():
            tensors |= _model_tensors(name, get_model_state_dict(model))
        for optimizer in self._optimizers.values():
            with contextlib.suppress(TypeError):
                optimizer.collect(tensors)
        return tensors

    def targets(self, saved: Saved) -> dict[str, Target]:
        """What is to be loaded, if the checkpoint is of this training.

        Raises:
            CheckpointMismatchError: It is not; all that is missing, superfluous or of another shape is listed.
        """
        targets: dict[str, Target] = {}
        problems = [f"it has no {name}" for name in self._shared_names() if name not in saved.shared]
        for name, model in self._models.items():
            if name in saved.shared:
                problems += _add_model_targets(name, model, saved, targets)
        for name, optimizer in self._optimizers.items():
            if name in saved.shared:
                more, speaks_against = optimizer.targets(saved.shared[name], saved.metadata)
                targets |= more
                problems += speaks_against
        problems += [problem for name in self._extras for problem in _own_problems(name, saved)]
        problems += self._data_problems(saved)
        if problems:
            msg = "the checkpoint is of another training: " + "; ".join(problems)
            raise CheckpointMismatchError(msg)
        return targets

    def _shared_names(self) -> tuple[str, ...]:
        return (*self._models, *self._optimizers, *self._schedulers)

    def _data_problems(self, saved: Saved) -> list[str]:
        if self.data is None:
            return []
        if self.is_on_any_grid:
            return ["it has no position of an air_nb DataLoader"] if saved.data is None else []
        if _DATA in saved.own and not saved.is_same_grid:
            return [
                (
                    f"the state of the loader ({type(self.data).__name__}) was saved by {saved.world_size} ranks and "
                    "says nothing to another number of them: resume on as many, or use air_nb.data.DataLoader"
                )
            ]
        return [] if _DATA in saved.own else [f"it has no state of a {type(self.data).__name__}"]

    def left_out(self, saved: Saved) -> list[str]:
        """What the checkpoint has and this training has not."""
        here = {*self._shared_names(), *self._extras} | ({_DATA} if self.data is not None else set())
        there = {*saved.shared, *saved.own} | ({_DATA} if saved.data is not None else set())
        return sorted(there - here)

    def apply_position(self, saved: Saved) -> None:
        """Put back the loader's state: what is most likely to be refused, before anything else is touched.

        Raises:
            DataError: The data set has changed, or is another one.
        """
        if self.data is not None:
            self.data.load_state_dict(saved.data if self.is_on_any_grid else thaw(saved.own[_DATA]))

    @torch.no_grad()
    def apply(self, saved: Saved, targets: Mapping[str, Target]) -> None:
        """Put back everything else."""
        for name, model in self._models.items():
            state = get_model_state_dict(model)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    local_part(value).copy_(targets[f"{name}.{key}"].part)
            # Nearly all is in place by now; this is for modules that make their state_dict from something else.
            set_model_state_dict(model, {**state, **thaw(saved.shared[name])})
        for name, optimizer in self._optimizers.items():
            optimizer.apply(saved.shared[name], targets)
        for name, scheduler in self._schedulers.items():
            scheduler.load_state_dict(thaw(saved.shared[name]))
        for name, extra in self._extras.items():
            extra.load_state_dict(thaw(saved.own[name]))


def _model_tensors(name: str, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{name}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}


def _add_model_targets(name: str, model: nn.Module, saved: Saved, targets: dict[str, Target]) -> list[str]:
    state = get_model_state_dict(model)
    prefix = f"{name}."
    there = {key.removeprefix(prefix) for key in saved.metadata.state_dict_metadata if key.startswith(prefix)}
    problems = differences(name, state, there | set(saved.shared[name]))
    for key, value in state.items():
        entry = saved.metadata.state_dict_metadata.get(prefix + key)
        if not isinstance(value, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
            continue
        found = _described(entry.size, entry.properties.dtype)
        if found != (wanted := _described(value.shape, value.dtype)):
            problems.append(f"{prefix}{key} is {found} there, {wanted} here")
        else:
            targets[prefix + key] = Target(value, value.dtype)
    return problems


def _described(size: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(size)}"


def _own_problems(name: str, saved: Saved) -> list[str]:
    if name not in saved.own:
        return [f"it has no {name}"]
    if not saved.is_same_grid and name not in saved.alike:
        return [f"{name} was different on each of the {saved.world_size} ranks that saved it: resume on as many"]
    return []


def _by_name(kind: str, given: Any) -> dict[str, Any]:
    """Names of one or several objects in the checkpoint: ``optimizer``, ``optimizer.0``, ``optimizer.generator``."""
    if given is None:
        return {}
    if isinstance(given, list | tuple):
        return {f"{kind}.{index}": one for index, one in enumerate(given)}
    if not isinstance(given, Mapping):
        return {kind: given}
    for name in given:
        if "." in str(name):
            msg = f"{kind} {name!r}: a name without dots, which separate names in the checkpoint"
            raise ValueError(msg)
    return {f"{kind}.{name}": one for name, one in given.items()}


def _must_have_state(name: str, one: Any) -> None:
    if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
        msg = f"{name} is a {type(one).__name__} without state_dict() and load_state_dict(), so it can't be saved" + (
            "; torch's DataLoader has none: air_nb.data.DataLoader takes the same arguments" * (name == _DATA)
        )
        raise TypeError(msg)


def _refuse_flat_shards(name: str, model: nn.Module) -> None:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        msg = (
            f"{name} is wrapped by FullyShardedDataParallel; its successor, torch's fully_shard, is supported: use that"
        )
        raise TypeError(msg)
