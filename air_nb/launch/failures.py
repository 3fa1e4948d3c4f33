"""How a rank's end reads to a person: signal, exit code or exception, and what usually helps (pure but for the time)."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from air_nb.errors import RankFailure

if TYPE_CHECKING:
    from air_nb.launch.rank_process import RankProcess

__all__ = ["describe_failure"]

_HINTS_BY_TEXT = (
    ("CUDA out of memory", "`%air gpus` shows who holds the memory of each GPU"),
    ("Address already in use", "a fixed port is taken; leave MASTER_PORT to the launcher, it never clashes"),
    ("Unable to find address for", "set GLOO_SOCKET_IFNAME (gloo) or NCCL_SOCKET_IFNAME (NCCL) to an interface that exists, with --env"),
    ("No space left on device", "a disk or /dev/shm is full: `df -h . /dev/shm /tmp`"),
    ("unable to open shared memory object", "/dev/shm is too small for the loader workers: use fewer, or enlarge it"),
    ("DataLoader worker", "if a worker was killed: /dev/shm or memory may be too small; try num_workers=0 to see the error itself"),
    ("Connection closed by peer", "another rank ended first; its own output may say why (`%air logs`)"),
)
_HINTS_BY_SIGNAL = {
    "SIGKILL": "likely the system ran out of memory (see `dmesg`), or somebody sent kill -9",
    "SIGSEGV": "a crash in native code: the Python stack at that moment is at the end of the rank's stderr",
    "SIGBUS": "/dev/shm may be full: use fewer loader workers, or enlarge it",
}


def describe_failure(rank: RankProcess, attempt: int) -> RankFailure:
    """The failure of a rank that has failed."""
    exit_code = rank.poll()
    report = rank.report
    if report is not None and not report.ok:
        return RankFailure(
            rank=rank.rank,
            attempt=attempt,
            pid=rank.pid,
            exit_code=report.exit_code,
            signal=None,
            type_name=report.type_name,
            message=report.message,
            traceback=report.traceback,
            at=report.at,
            hint=_hint_for_text(f"{report.type_name}: {report.message}"),
        )
    name = _signal_name(exit_code)
    return RankFailure(
        rank=rank.rank,
        attempt=attempt,
        pid=rank.pid,
        exit_code=None if name else exit_code,
        signal=name,
        type_name="",
        message=f"was killed by {name}" if name else f"ended with exit code {exit_code} before its work was done",
        traceback="",
        at=time.time(),
        hint=_HINTS_BY_SIGNAL.get(name or ""),
    )


def _signal_name(exit_code: int | None) -> str | None:
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _hint_for_text(text: str) -> str | None:
    return next((hint for part, hint in _HINTS_BY_TEXT if part in text), None)
