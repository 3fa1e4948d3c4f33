"""A small training that draws random numbers, for tests of checkpoints: on one process or on gloo ranks.

Each rank imports this module; what it returns pickles.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from air_nb.checkpoint import CheckpointManager, seed_everything
from air_nb.checkpoint.events import CheckpointEvent
from air_nb.data import DataLoader

__all__ = ["SAMPLES", "Outcome", "Training", "flip", "full_state", "only_checkpoint", "train"]

SAMPLES = 40
GLOBAL_BATCH = 4


class Rows(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Numbered rows."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(5, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Training:
    """What to train.

    Attributes:
        root: Root of the checkpoints.
        kind: ``plain``, ``ddp`` or ``fsdp``.
        epochs: How many.
        every: See ``CheckpointManager``.
        leave_at: Leave the loop when it is given this step.
        options: More for the manager.
    """

    root: str
    kind: str = "plain"
    epochs: int = 2
    every: int | str | None = 3
    leave_at: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """How a training went, on one rank.

    Attributes:
        steps: The steps that it was given.
        losses: One for each.
        samples: Ids in each batch of this rank that count.
        state: Digest of the whole model and optimizer.
        draws: What the generators would give next.
        events: Kinds and messages.
    """

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    state: str = ""
    draws: tuple[float, ...] = ()
    events: list[tuple[str, str]] = field(default_factory=list)


class RunningMean(nn.Module):
    """As in BatchNorm: buffers that are other ones on each rank, of which DDP takes rank 0's in each step."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Subtract it, and follow."""
        mean = self.mean.clone()
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.count += 1
        return x - mean


@dataclass(slots=True)
class Parts:
    """The objects of a training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    loader: DataLoader


def build(kind: str) -> Parts:
    """Make the objects, with random numbers that differ between ranks from here on."""
    torch.manual_seed(0)
    # Odd sizes: shards of unequal and of no length.
    model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.3), RunningMean(7), nn.Linear(7, 1))
    model = model.double()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        for part in (model[0], model[4]):  # type: ignore[index]
            fully_shard(part)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    loader = DataLoader(Rows(), batch_size=GLOBAL_BATCH // world_size, shuffle=True, seed=5, num_workers=0)
    seed_everything(7)
    return Parts(model, optimizer, scheduler, loader)


def train(training: Training, during: Callable[[int, CheckpointManager], None] | None = None) -> Outcome:
    """Train, from the newest checkpoint on; ``during`` is called in each step."""
    parts, outcome = build(training.kind), Outcome()

    def note(event: CheckpointEvent) -> None:
        outcome.events.append((str(event.kind), event.message))

    manager = CheckpointManager(
        training.root,
        model=parts.model,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        data=parts.loader,
        every=training.every,
        on_event=note,
        **training.options,
    )
    for step, (ids, rows) in manager.steps(parts.loader, epochs=training.epochs):
        if step == training.leave_at:
            break
        if during is not None:
            during(step, manager)
        valid = parts.loader.valid
        loss = (parts.model(rows + 0.1 * random.random() + 0.1 * np.random.rand())[valid] ** 2).mean()  # noqa: NPY002
        parts.optimizer.zero_grad()
        loss.backward()
        parts.optimizer.step()
        parts.scheduler.step()
        outcome.steps.append(step)
        outcome.losses.append(loss.item())
        outcome.samples.append(ids[valid].tolist())
    manager.close()
    outcome.state = full_state(parts.model, parts.optimizer)
    outcome.draws = (random.random(), float(np.random.rand()), torch.rand(1).item())  # noqa: NPY002
    return outcome


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, buffers: bool = True) -> str:
    """Digest of whole parameters, moments and this rank's buffers. Collective where the model is sharded."""
    digest = hashlib.sha256()
    tensors = list((model.state_dict() if buffers else dict(model.named_parameters())).values())
    for state in optimizer.state.values():
        tensors += [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.detach().contiguous().numpy().tobytes())
    digest.update(repr([group["lr"] for group in optimizer.param_groups]).encode())
    return digest.hexdigest()


def only_checkpoint(root: Path, step: int) -> Path:
    """The one checkpoint of a step."""
    (found,) = root.glob(f"step_{step}.*")
    return found


def flip(path: Path, at: float = 0.5) -> None:
    """Change one bit, at that fraction of the file."""
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def kill_this_process() -> None:
    """As the out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)
