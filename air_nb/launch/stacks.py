"""Has ranks write the Python stacks of their threads to ``rank_<r>.stacks``, and waits until they have (bounded).

Called by whoever wants to know where the ranks are: the node agent, or any kernel of the same user.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from air_nb.protocol.start import STACKS_SIGNAL_OFFSET

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from air_nb.runs.directory import RunDirectory
    from air_nb.runs.liveness import ProcessId

__all__ = ["collect_stacks"]

_LOOK_S = 0.02


def collect_stacks(directory: RunDirectory, ranks: Mapping[int, ProcessId], bound_s: float) -> None:
    """Ask ranks for their stacks; afterwards the file of one that has not answered is empty, or not there.

    A rank that has not come as far as to expect the question has it blocked, and answers when it does.

    Args:
        directory: The run.
        ranks: Process by rank.
        bound_s: How long they have. One that blocks in C answers at once, a stopped one never.
    """
    paths = [directory.rank_file(rank, "stacks") for rank in ranks]
    for path in paths:
        with suppress(FileNotFoundError):
            os.truncate(path, 0)  # the rank appends, so what was there before would pass for the answer
    # An int: signal.Signals has no members between SIGRTMIN and SIGRTMAX.
    number = signal.SIGRTMIN + STACKS_SIGNAL_OFFSET
    waited_for = [path for path, process in zip(paths, ranks.values(), strict=True) if process.send_signal(number)]
    end = time.monotonic() + bound_s
    before: list[int] = []
    while waited_for and time.monotonic() < end:
        time.sleep(_LOOK_S)
        sizes = [_size(path) for path in waited_for]
        if all(sizes) and sizes == before:  # a dump is many small writes
            return
        before = sizes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
