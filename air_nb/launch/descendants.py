"""Ends processes below one of ours, and only those.

Launcher and forkserver are child subreapers: whatever a rank leaves behind, daemons included, becomes a child of the
forkserver and stays below it. psutil compares start times before it signals, so a reused pid is never hit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection

import psutil

__all__ = ["become_subreaper", "kill_descendants"]

_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 20


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(pid: int, *, groups: Collection[int] | None = None, spare: Collection[int] = ()) -> None:
    """SIGKILL what is below a process, again until nothing new appears (a fork can outrun one pass).

    Args:
        pid: Root; it is not killed itself.
        groups: Only processes of these process groups; None is all.
        spare: Pids that may live.
    """
    if groups is not None and not any(map(_exists, groups)):
        return  # the usual case; looking at every process of a host takes 10 ms and more
    for _ in range(_ROUNDS):
        victims = [child for child in _below(pid) if child.pid not in spare]
        if groups is not None:
            victims = [victim for victim in victims if _group(victim.pid) in groups]
        if not victims:
            return
        for victim in victims:
            with contextlib.suppress(psutil.Error):
                victim.kill()
        psutil.wait_procs(victims, timeout=0.05)


def _below(pid: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if _is_running(child)]


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
