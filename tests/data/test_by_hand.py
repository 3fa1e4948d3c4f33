"""Training and resuming without the manager, as it is documented for AI Runtime: only the imports are ours.

The training below runs on ranks of the tests, under torchrun and alone; as a script it is what a user would write.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from air_nb.checkpoint import find_latest_valid, list_checkpoints, seed_everything, verify
from air_nb.data import DataLoader, UCVolumeDataset, UCVolumeReader, UCVolumeWriter
from tests.support.ranks import RanksFailedError, run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # so it is: the intent is as it says
    pytest.mark.usefixtures("forkserver"),
]

_SAMPLES = 60
_GLOBAL_BATCH = 12
_EPOCHS = 3
_STEPS_PER_EPOCH = _SAMPLES // _GLOBAL_BATCH
_EVERY = 2
_LAST = _EPOCHS * _STEPS_PER_EPOCH // _EVERY * _EVERY
_KILL_AT = 9  # the checkpoints of steps 6 and maybe 8 are there: both in the middle of an epoch

# ---------------------------------------------------------------------------------------------------- the training


def train(data: str, root: str, kill_at: int | None = None) -> dict[str, Any]:
    """Train from the newest valid checkpoint on; ``data`` is the directory of a volume, or "sampler"."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(2, 1).double()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    batches = SamplerBatches() if data == "sampler" else VolumeBatches(data)
    # Of its own: the thread that saves and the step that goes on would mix up their messages on the same one.
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None
    seed_everything(1)

    begin = load(root, model, optimizer, batches)
    rows, saving = [], None
    for step, (ids, x) in enumerate(batches.from_step(begin), begin):
        if step == kill_at and _rank() == _world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.append([ids, loss.item(), random.random(), float(np.random.rand()), torch.rand(1).item()])  # noqa: NPY002
        if (step + 1) % _EVERY == 0:
            if saving is not None:
                saving.result()
            saving = save(f"{root}/step_{step + 1}", step + 1, model, optimizer, batches, group)
    if saving is not None:
        saving.result()
    return {"begin": begin, "rows": rows, "weights": _digest(model, optimizer)}


def save(path: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, group: Any) -> Any:
    """Begin to save; the future says when it is done."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # What differs between ranks needs a key of its own for each: DCP saves equal keys once.
    rng = {f"rank_{_rank()}": rng_state()}
    state = {"model": model_state, "optimizer": optimizer_state, "step": step, "data": batches.state_dict(), "rng": rng}
    return dcp.async_save(  # type: ignore[attr-defined] # torch lists no exports
        state, storage_writer=UCVolumeWriter(path), process_group=group
    )


def load(root: str, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> int:
    """Restore the newest valid checkpoint; the number of steps completed."""
    latest = find_latest_valid(root)
    if latest is None:
        return 0
    reader = UCVolumeReader(latest.path)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0, "data": batches.state_dict()}
    was_there = f"rng.rank_{_rank()}.torch" in reader.read_metadata().state_dict_metadata
    if was_there:
        state["rng"] = {f"rank_{_rank()}": rng_state()}
    dcp.load(state, storage_reader=reader)  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    batches.load_state_dict(state["data"])
    if was_there:
        set_rng_state(state["rng"][f"rank_{_rank()}"])
    return int(state["step"])


def rng_state() -> dict[str, Any]:
    """Of all generators of this rank."""
    numpy_state = np.random.get_state()  # noqa: NPY002
    return {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}


def set_rng_state(state: dict[str, Any]) -> None:
    """Set them."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])


class VolumeBatches:
    """Files of a volume, through our loader: it goes on in mid-epoch on any number of ranks."""

    def __init__(self, path: str) -> None:
        self.loader = DataLoader(
            UCVolumeDataset(path), batch_size=_GLOBAL_BATCH // _world_size(), shuffle=True, num_workers=0
        )
        self.state_dict, self.load_state_dict = self.loader.state_dict, self.loader.load_state_dict

    def from_step(self, begin: int) -> Iterator[tuple[list[int], torch.Tensor]]:
        """The rest of the training."""
        for epoch in range(begin // _STEPS_PER_EPOCH, _EPOCHS):
            self.loader.set_epoch(epoch)
            for paths in self.loader:
                values = torch.tensor([[float(Path(path).read_text()), 1.0] for path in paths], dtype=torch.float64)
                yield [int(Path(path).stem) for path in paths], values


class SamplerBatches:
    """torch's own loader and sampler: by hand, on as many ranks as before."""

    def __init__(self) -> None:
        x = torch.arange(_SAMPLES, dtype=torch.float64)[:, None] / _SAMPLES
        dataset = TensorDataset(torch.arange(_SAMPLES), torch.cat([x, torch.ones_like(x)], 1))
        self.sampler: Any = DistributedSampler(dataset, _world_size(), _rank(), shuffle=True)
        # A generator of its own: else each epoch draws from the one that is saved.
        self.loader: Any = torch.utils.data.DataLoader(
            dataset, _GLOBAL_BATCH // _world_size(), sampler=self.sampler, generator=torch.Generator()
        )

    def from_step(self, begin: int) -> Iterator[tuple[list[int], torch.Tensor]]:
        """The rest of the training."""
        for epoch in range(begin // _STEPS_PER_EPOCH, _EPOCHS):
            self.sampler.set_epoch(epoch)
            done = max(0, begin - epoch * _STEPS_PER_EPOCH)
            for numbers, x in itertools.islice(self.loader, done, None):
                yield numbers.tolist(), x

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position follow from the step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Likewise."""


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = [*model.state_dict().values()]
    for state in optimizer.state.values():
        tensors += [state[name] for name in sorted(state)]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("root")
    parser.add_argument("results")
    arguments = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    result = train(arguments.data, arguments.root)
    Path(arguments.results, f"{_rank()}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------ on ranks


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of one level, as UCVolumeDataset reads it."""
    directory = tmp_path_factory.mktemp("volumes") / "main" / "default" / "numbers"
    directory.mkdir(parents=True)
    for number in range(_SAMPLES):
        (directory / f"{number:02}.txt").write_text(f"{number / _SAMPLES}")
    return directory


@pytest.fixture(scope="module")
def uninterrupted(volume, forkserver, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """What nothing has happened to, on two ranks, by the kind of data."""
    root = tmp_path_factory.mktemp("uninterrupted")
    return {
        "volume": run_ranks(2, train, str(volume), str(root / "volume")),
        "sampler": run_ranks(2, train, "sampler", str(root / "sampler")),
    }


@pytest.mark.parametrize("kind", ["volume", "sampler"])
def test_killed_in_mid_epoch_and_resumed_it_is_as_if_nothing_had_happened(kind, volume, uninterrupted, tmp_path):
    data = str(volume) if kind == "volume" else "sampler"
    with pytest.raises(RanksFailedError):
        run_ranks(2, train, data, str(tmp_path), _KILL_AT)
    resumed = run_ranks(2, train, data, str(tmp_path))

    _check_same(resumed, uninterrupted[kind])


def test_the_same_on_another_number_of_ranks(volume, uninterrupted, tmp_path):
    with pytest.raises(RanksFailedError):
        run_ranks(2, train, str(volume), str(tmp_path), _KILL_AT)
    resumed = run_ranks(3, train, str(volume), str(tmp_path))

    begin = resumed[0]["begin"]
    assert begin in {6, 8}
    assert _steps(resumed) == _steps(uninterrupted["volume"])[begin:]
    assert _losses(resumed) == pytest.approx(_losses(uninterrupted["volume"])[begin:], rel=1e-9)


def _check_same(resumed: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Samples, losses, random numbers and, at the end, every bit of model and optimizer, on each rank."""
    begin = resumed[0]["begin"]
    assert begin in {6, 8}
    for mine, other in zip(resumed, expected, strict=True):
        assert mine["rows"] == other["rows"][begin:]
        assert mine["weights"] == other["weights"]


def _steps(outcome: list[dict[str, Any]]) -> list[list[int]]:
    """Sorted ids of each step, of all ranks together."""
    return [sorted(n for row in rows for n in row[0]) for rows in zip(*(o["rows"] for o in outcome), strict=True)]


def _losses(outcome: list[dict[str, Any]]) -> list[float]:
    return [sum(row[1] for row in rows) / len(rows) for rows in zip(*(o["rows"] for o in outcome), strict=True)]


def test_all_samples_come_once_per_epoch(uninterrupted):
    for outcome in uninterrupted.values():
        steps = _steps(outcome)
        for epoch in range(_EPOCHS):
            ids = itertools.chain.from_iterable(steps[epoch * _STEPS_PER_EPOCH : (epoch + 1) * _STEPS_PER_EPOCH])
            assert sorted(ids) == list(range(_SAMPLES))


# ---------------------------------------------------------------------------------------------- the newest valid one


@pytest.fixture
def root(volume: Path, tmp_path: Path) -> Path:
    """Checkpoints of a training in this process."""
    train(str(volume), str(tmp_path))
    return tmp_path


def test_all_checkpoints_are_listed_the_newest_first(root):
    found = list_checkpoints(root)

    assert [checkpoint.step for checkpoint in found] == list(range(_LAST, 0, -_EVERY))
    assert all(checkpoint.is_valid and verify(checkpoint.path, deep=True).ok for checkpoint in found)
    assert find_latest_valid(root) == found[0]


@pytest.mark.parametrize("missing", [["COMMIT", "manifest.json", ".metadata"], ["__0_0.distcp"], ["manifest.json"]])
def test_what_was_not_finished_or_has_lost_a_file_is_passed_over(root, volume, missing):
    for name in missing:
        (root / f"step_{_LAST}" / name).unlink()

    latest = find_latest_valid(root)
    assert latest is not None
    assert latest.step == _LAST - _EVERY
    assert train(str(volume), str(root))["begin"] == _LAST - _EVERY


def test_a_flipped_bit_is_found_before_the_model_is_touched(root, volume):
    shard = root / f"step_{_LAST}" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    model = nn.Linear(2, 1).double()
    before = [parameter.clone() for parameter in model.parameters()]

    with pytest.raises(dcp.api.CheckpointException, match=r"__0_0\.distcp"):
        load(str(root), model, torch.optim.AdamW(model.parameters(), lr=0.05), VolumeBatches(str(volume)))

    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    whole = [checkpoint for checkpoint in list_checkpoints(root) if verify(checkpoint.path, deep=True).ok]
    assert whole[0].step == _LAST - _EVERY


# ------------------------------------------------------------------------------------------------------- real programs


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_alone_and_under_torchrun_goes_on_with_what_was_killed(ranks, volume, uninterrupted, tmp_path):
    root, results = str(tmp_path / "checkpoints"), tmp_path / "results"
    results.mkdir()
    with pytest.raises(RanksFailedError):
        run_ranks(ranks, train, str(volume), root, _KILL_AT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["/Volumes/main/default/numbers", root, str(results)]
    env = os.environ | {
        "AIR_NB_VOLUMES": str(volume.parents[2]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, *(torchrun if ranks > 1 else []), __file__, *arguments]
    script = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert script.returncode == 0, script.stderr

    outcome = [json.loads((results / f"{rank}.json").read_text()) for rank in range(ranks)]
    alone = tmp_path / "alone"
    _check_same(outcome, uninterrupted["volume"] if ranks > 1 else run_ranks(1, train, str(volume), str(alone)))


if __name__ == "__main__":
    _main()
