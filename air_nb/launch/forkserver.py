"""The process that ranks are forked from: its warm-up, start and lifeline, and the door through which a rank enters.

It is multiprocessing's own forkserver, but forked from the launcher instead of executed anew: torch is then imported
once, and its memory is shared by launcher, forkserver and ranks.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import sys
import traceback
import types
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from air_nb.launch.descendants import become_subreaper, kill_descendants
from air_nb.protocol.start import STACKS_SIGNAL_OFFSET

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from air_nb.protocol.start import RankStart

__all__ = ["DEEPEN_SIGNAL", "enter_rank", "probe", "start_forkserver", "warm"]

_WARM_MODULES = ("air_nb.rank.main", "air_nb.launch.agent")
_IDLE_MODULE = "torch._dynamo"
DEEPEN_SIGNAL = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1
_problem = ""


def _end_with_launcher(_number: int, _frame: types.FrameType | None) -> None:
    """The launcher is gone: end what is left of its runs, daemonised grandchildren too, then this process."""
    kill_descendants(os.getpid())
    os._exit(1)


def warm() -> None:
    """In the launcher, before the fork: import what it and every rank need, so that they share the memory."""
    _import(*_WARM_MODULES)


def _import(*names: str) -> None:
    global _problem  # noqa: PLW0603 - read by probe(), in children of this process
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - a border: the user's torch may be broken, and the kernel has to show why
            _problem = f"importing {name} failed:\n{traceback.format_exc()}"
            sys.stderr.write(_problem)  # the launcher's log; after the warm-up nobody asks any more
    # A collection in a rank would write into every object's header and so copy the pages that ranks share.
    gc.collect()
    gc.freeze()


def _deepen(_number: int, _frame: types.FrameType | None) -> None:
    """Import while idle what is too slow to make the first cell wait for: an optimizer imports torch._dynamo (1.2 s).

    A signal that arrives while this process forks is no danger: CPython drops pending ones in the child.
    """
    _import(_IDLE_MODULE)


def start_forkserver(private: Sequence[int]) -> int:
    """Start multiprocessing's forkserver as a fork of this process. In the launcher's main thread.

    Args:
        private: Descriptors that must not go along: the end of a pipe between kernel and launcher tells who is gone.

    Returns:
        Its pid.
    """
    resource_tracker.ensure_running()  # a program of its own, so before the way to start programs is changed
    execute = util.spawnv_passfds
    pids: list[int] = []

    def fork_instead(_path: object, arguments: Sequence[Any], _descriptors: object) -> int:
        """Run what multiprocessing has for a new interpreter, ``[..., "-c", code]``, in a fork of this one."""
        launcher_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            util.spawnv_passfds = execute  # ranks start programs too
            for descriptor in private:
                os.close(descriptor)
            _serve(arguments[-1], launcher_pid)
        pids.append(pid)
        return pid

    util.spawnv_passfds = fork_instead  # type: ignore[assignment]
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = execute
    return pids[0]


def _serve(code: str, launcher_pid: int) -> NoReturn:
    try:
        _arm()
        if os.getppid() == launcher_pid:  # else it died before the death signal was set, which will never come then
            exec(code, {})  # noqa: S102 - multiprocessing's own: it imports its main() and calls it
    except Exception:  # noqa: BLE001 - the border of the process: the launcher's log says why it ended
        traceback.print_exc()
    finally:
        os._exit(1)


def _arm() -> None:
    # The death signal belongs to the thread that forked us: the launcher's main thread.
    signal.signal(signal.SIGTERM, _end_with_launcher)
    # A rank that is interrupted before it has its handler gets the signal when it unblocks it, and not never.
    # Likewise a request for stacks, which would kill it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGRTMIN + STACKS_SIGNAL_OFFSET})
    signal.signal(DEEPEN_SIGNAL, _deepen)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    become_subreaper()


def enter_rank(target: str, start: RankStart, report: Connection) -> None:
    """Become a rank: call ``module:function`` with these arguments and exit with what it returns."""
    module, _, function = target.partition(":")
    sys.exit(getattr(importlib.import_module(module), function)(start, report))


def probe(report: Connection) -> None:
    """In a throw-away child: tell the launcher whether ranks forked from here can be trusted."""
    report.send_bytes((_problem or _cuda_problem()).encode())


def _cuda_problem() -> str:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA was initialised while torch was imported: ranks forked from here could not use it"
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            opened = str(descriptor.readlink())
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if opened.startswith("/dev/nvidia"):
            return f"{opened} was opened while torch was imported: ranks forked from here could not use the GPUs"
    return ""
