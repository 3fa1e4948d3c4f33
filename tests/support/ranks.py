"""Real gloo ranks for a test: forked from a process that has imported torch, so that starting them is cheap.

A test that uses them asks for the fixture ``forkserver`` (tests/data/conftest.py).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

__all__ = ["RanksFailedError", "forkserver_with_torch", "run_ranks"]

_GRACE_S = 5.0  # what the others have to end in once one has failed


class RanksFailedError(AssertionError):
    """Ranks that failed; ``tracebacks`` has their tracebacks by rank, or how they died."""

    def __init__(self, tracebacks: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(tracebacks.items())))
        self.tracebacks = tracebacks


@contextmanager
def forkserver_with_torch() -> Iterator[None]:
    """The process that ranks and "forkserver" loader workers are forked from, while the context lasts."""
    server: Any = forkserver._forkserver  # there is no public way to end it
    # The last one brings what takes seconds to import: each rank would do so for itself.
    preload = ["torch", "torch.distributed", "torch.utils.data", "numpy", "air_nb.checkpoint.manager"]
    multiprocessing.set_forkserver_preload(preload)
    # multiprocessing's sockets: its own directory is removed when Python ends, by then that of the tests is gone.
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="mp") as sockets:
        config["tempdir"] = sockets
        server.ensure_running()
        try:
            yield
        finally:
            server._stop()
            del config["tempdir"]


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call a function of a test module on so many ranks with an initialised gloo group.

    Args:
        world_size: Number of ranks.
        function: Called as ``function(*args)``; ``torch.distributed`` says which rank it is.
        args: Its arguments, equal on all ranks.
        timeout_s: When to give up; all are killed then. Once one has failed the others have 5 s.

    Returns:
        The results, index = rank.

    Raises:
        RanksFailedError: One raised, died, or did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store"
        ranks = [_Rank(context, rank, world_size, store, function, args) for rank in range(world_size)]
        try:
            return _results(ranks, time.monotonic() + timeout_s)
        finally:
            for rank in ranks:
                rank.end()


class _Rank:
    def __init__(self, context: Any, rank: int, world_size: int, store: Path, function: Any, args: Any) -> None:
        self.answers, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_main, args=(theirs, rank, world_size, str(store), function, args), name=f"rank {rank}"
        )
        self.process.start()
        theirs.close()

    def answer(self) -> tuple[bool, Any]:
        """Whether it succeeded, and its result or what went wrong."""
        try:
            # Loader workers hold the other end too: after a death the end of the pipe may take a while to come.
            succeeded, value = self.answers.recv() if self.answers.poll() else (False, None)
        except EOFError:
            succeeded, value = False, None
        if value is None and not succeeded:
            self.process.join()
            value = f"exit code {self.process.exitcode}"
        return succeeded, value

    def end(self) -> None:
        if self.process.exitcode != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # and its loader workers, which it could not end
        self.process.join()
        self.process.close()
        self.answers.close()


def _results(ranks: list[_Rank], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failed: dict[int, Any] = {}
    while len(results) + len(failed) < len(ranks):
        waiting = {number: rank for number, rank in enumerate(ranks) if number not in results.keys() | failed.keys()}
        if failed:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        signs: dict[Any, int] = {rank.answers: number for number, rank in waiting.items()}
        signs |= {rank.process.sentinel: number for number, rank in waiting.items()}
        ready = multiprocessing.connection.wait(list(signs), max(0.0, deadline - time.monotonic()))
        if not ready:
            failed |= dict.fromkeys(waiting, "did not end in time")
        for number in {signs[sign] for sign in ready}:
            succeeded, value = ranks[number].answer()
            (results if succeeded else failed)[number] = value
    if failed:
        raise RanksFailedError(failed)
    return [results[number] for number in range(len(ranks))]


def _main(answers: Any, rank: int, world_size: int, store: str, function: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    os.setsid()
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        try:
            dist.barrier()  # a rank that has nothing to do would be gone before the others have connected
            answers.send((True, function(*args)))
        finally:
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  # the border of the process
        answers.send((False, traceback.format_exc()))
