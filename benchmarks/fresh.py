"""Calls a function in a fresh process: forked from one that has imported torch, so that it starts at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

__all__ = ["Taken", "in_fresh_process"]


@dataclass(frozen=True, slots=True)
class Taken:
    """One value that was measured there.

    Attributes:
        what: What was measured.
        tool: Of which tool.
        value: The value.
        unit: Its unit.
    """

    what: str
    tool: str
    value: float
    unit: str


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a module there and return its result; ``forkserver_with_torch`` must be active.

    Raises:
        Exception: What the function raised.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(_call, function, args).result()


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch

    # One thread, as ranks and loader workers have: several would wait for each other on a busy machine.
    torch.set_num_threads(1)
    # Loader workers start as in a plain script; what a forkserver starts would else start its own, which takes seconds.
    multiprocessing.set_start_method("fork", force=True)
    return function(*args)
