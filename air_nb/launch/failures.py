"""Which ranks have failed, which of them first, and how that reads to a person (pure)."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from air_nb.errors import RankFailure

if TYPE_CHECKING:
    from air_nb.launch.rank_process import RankProcess

__all__ = ["describe_exit", "find_failures", "has_failed"]

# ruff: noqa: S108 - texts about /dev/shm, not uses of it
_HINTS_BY_TEXT = (
    ("CUDA out of memory", "`%air gpus` shows who holds the memory of each GPU"),
    ("Address already in use", "a fixed port is taken; leave MASTER_PORT to the launcher, it never clashes"),
    (
        "Unable to find address for",
        "set GLOO_SOCKET_IFNAME (gloo) or NCCL_SOCKET_IFNAME (NCCL) to an interface that exists, with --env",
    ),
    (
        "No space left on device",
        "a disk or /dev/shm is full: `df -h . /dev/shm /tmp`; output and results go to AIR_NB_HOME (`%air doctor`)",
    ),
    ("unable to open shared memory object", "/dev/shm is too small for the loader workers: use fewer, or enlarge it"),
    (
        "DataLoader worker",
        "if a worker was killed: /dev/shm or memory may be too small; try num_workers=0 to see the error itself",
    ),
    ("Connection closed by peer", "another rank ended first; its own output may say why (`%air logs`)"),
)
_HINTS_BY_SIGNAL = {
    "SIGKILL": "likely the system ran out of memory (see `dmesg`), or somebody sent kill -9",
    "SIGSEGV": "a crash in native code: the Python stack at that moment is at the end of the rank's stderr",
    "SIGBUS": "/dev/shm may be full: use fewer loader workers, or enlarge it",
}


def has_failed(rank: RankProcess) -> bool:
    """A bad report counts at once, an exit only if no good report came before it."""
    exit_code = rank.poll()
    if rank.report is not None and not rank.report.ok:
        return True
    return exit_code is not None and (exit_code != 0 or rank.report is None)


def find_failures(ranks: Sequence[RankProcess], attempt: int) -> list[RankFailure]:
    """All failed ranks, the cause first, without those whose collective broke because another rank was gone.

    A death without a word comes before any report: its peers notice closed sockets before the launcher can notice the
    death, and what they report then is its consequence. Else the earliest report is the cause.
    """
    failed = sorted((rank for rank in ranks if has_failed(rank)), key=_order)
    cause, *rest = failed
    if not _is_broken_collective(cause):
        rest = [rank for rank in rest if not _is_broken_collective(rank)]
    return [_describe(rank, attempt) for rank in (cause, *rest)]


def _order(rank: RankProcess) -> tuple[int, float]:
    if rank.report is not None and not rank.report.ok:
        return 2, rank.report.at
    return (0 if (rank.poll() or 0) < 0 else 1), rank.ended_at


def _is_broken_collective(rank: RankProcess) -> bool:
    return rank.report is not None and rank.report.in_collective


def _describe(rank: RankProcess, attempt: int) -> RankFailure:
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
    assert exit_code is not None
    name = _signal_name(exit_code)
    return RankFailure(
        rank=rank.rank,
        attempt=attempt,
        pid=rank.pid,
        exit_code=None if name else exit_code,
        signal=name,
        type_name="",
        message=describe_exit(exit_code) + ("" if name else " before its work was done"),
        traceback="",
        at=rank.ended_at,
        hint=_HINTS_BY_SIGNAL.get(name or ""),
    )


def describe_exit(exit_code: int) -> str:
    """``-9`` -> ``"was killed by SIGKILL"``."""
    name = _signal_name(exit_code)
    return f"was killed by {name}" if name else f"ended with exit code {exit_code}"


def _signal_name(exit_code: int) -> str | None:
    if exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _hint_for_text(text: str) -> str | None:
    return next((hint for part, hint in _HINTS_BY_TEXT if part in text), None)
