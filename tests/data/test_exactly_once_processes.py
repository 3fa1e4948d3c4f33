"""Every example once per epoch with real ranks and loader workers, killed by SIGKILL at random moments."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from air_nb.data import DataLoader
from tests.support.ranks import RanksFailedError, run_ranks

pytestmark = [pytest.mark.usefixtures("forkserver"), pytest.mark.timeout(600)]

_EPOCHS = 2
_KILLS = 4


class Items:
    """Item i is (i, 0), and takes a moment."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[int, int]:
        time.sleep(0.002)
        return index, 0

    def everything(self) -> list[tuple[int, int]]:
        return [(index, 0) for index in range(60)]


class Documents:
    """Item i has i modulo 7 examples, each of which takes a moment."""

    def __len__(self) -> int:
        return 25

    def examples(self, index: int, start: int = 0) -> Iterator[tuple[int, int]]:
        for number in range(start, index % 7):
            time.sleep(0.002)
            yield index, number

    def everything(self) -> list[tuple[int, int]]:
        return [(index, number) for index in range(25) for number in range(index % 7)]


def _train(dataset: Any, loading: dict[str, Any], checkpoint: Path, kill: dict[str, Any] | None) -> None:
    """Train from the checkpoint, and save it every third step."""
    loader = DataLoader(dataset, shuffle=True, collate_fn=list, **loading)
    saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"state": None, "ledger": {}}
    ledger: dict[str, list[Any]] = saved["ledger"]
    if saved["state"] is not None:
        loader.load_state_dict(saved["state"])
    if kill is not None and kill["rank"] == dist.get_rank():
        threading.Timer(kill["after_s"], _kill, (kill["worker"],)).start()
    for epoch in range(loader.epoch, _EPOCHS):
        for step, batch in enumerate(loader):
            mine = [row for row, counts in zip(batch, loader.valid.tolist(), strict=True) if counts]
            shares: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(shares, mine)
            ledger.setdefault(str(epoch), []).extend(row for share in shares for row in share)
            if step % 3 == 2:
                _save(checkpoint, {"state": loader.state_dict(), "ledger": ledger})
    _save(checkpoint, {"state": loader.state_dict(), "ledger": ledger})


def _kill(worker: bool) -> None:
    """SIGKILL to this rank, or to a loader worker of it."""
    workers = psutil.Process().children() if worker else []
    os.kill(random.choice(workers).pid if workers else os.getpid(), signal.SIGKILL)


def _save(checkpoint: Path, content: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        temporary = checkpoint.with_suffix(".tmp")
        temporary.write_text(json.dumps(content))
        temporary.rename(checkpoint)


@pytest.mark.parametrize("dataset", [Items(), Documents()], ids=["items", "stream"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_every_example_comes_once_per_epoch_although_ranks_and_workers_are_killed(dataset, seed, tmp_path):
    draws = random.Random(seed)
    checkpoint = tmp_path / "checkpoint.json"
    for attempt in range(_KILLS + 1):
        world_size = draws.randint(1, 4)
        loading: dict[str, Any] = {"batch_size": draws.randint(1, 4), "num_workers": draws.randint(0, 2)}
        if loading["num_workers"]:
            loading |= {"multiprocessing_context": "fork", "persistent_workers": draws.random() < 0.5}
        kill = {
            "rank": draws.randrange(world_size),
            "after_s": draws.uniform(0, 0.4),
            "worker": draws.random() < 0.5,
        }
        try:
            run_ranks(world_size, _train, dataset, loading, checkpoint, kill if attempt < _KILLS else None)
        except RanksFailedError:
            if attempt == _KILLS:  # it was let live
                raise
    ledger = json.loads(checkpoint.read_text())["ledger"]
    for epoch in range(_EPOCHS):
        assert Counter(map(tuple, ledger[str(epoch)])) == Counter(dataset.everything())
