"""Makes a freshly forked rank look like a process that was started by hand in the kernel's place."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from multiprocessing import forkserver, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from air_nb.protocol.start import STACKS_SIGNAL_OFFSET
from air_nb.rank import warm

if TYPE_CHECKING:
    from air_nb.protocol.start import RankStart
    from air_nb.protocol.task import RankTask

__all__ = ["adopt_environment", "adopt_task", "arm_lifeline", "arm_signals"]

_PR_SET_PDEATHSIG = 1
_WINDOWED = ("ipympl", "widget", "nbagg", "qt", "tk", "gtk", "wx", "macosx")


def arm_lifeline() -> None:
    """Tie this rank to the forkserver and the launcher: it and its process group end with either.

    The kernel's death signal covers the forkserver. The launcher's death closes the other end of the sentinel pipe, for
    which a small thread waits; a death signal can't be used for that, since a rank is no child of the launcher.
    """
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setpgid(0, 0)
    launcher = parent_process()
    assert launcher is not None

    def end_with_launcher() -> None:
        wait([launcher.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_launcher, name="air_nb-lifeline", daemon=True).start()


def arm_signals(directory: Path, rank: int) -> None:
    """Default signal handlers, and Python stacks on a crash (stderr) or when the launcher asks for them (a file)."""
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in every Python process: a write raises BrokenPipeError
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=2)
    stacks = os.open(directory / f"rank_{rank}.stacks", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    ask_stacks = signal.SIGRTMIN + STACKS_SIGNAL_OFFSET
    faulthandler.register(ask_stacks, file=stacks, all_threads=True, chain=False)
    # Blocked since the forkserver: early ones come now. SIGINT last, since it ends this function.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {ask_stacks})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def adopt_environment(start: RankStart) -> None:
    """The kernel's environment with torchrun's variables, and nothing of the launcher's own."""
    os.environ.clear()
    os.environ.update(start.env)
    tempfile.tempdir = None  # cached from the launcher's environment


def adopt_task(task: RankTask) -> None:
    """Working directory, module path, arguments, seeds, threads and logging level of the kernel."""
    os.chdir(task.cwd)
    sys.path[:] = task.sys_path
    sys.argv[:] = task.argv
    importlib.invalidate_caches()  # helper modules as they are on disk now
    _own_multiprocessing()
    _reseed()
    _limit_threads(task.threads)
    _adopt_logging(task)


def _own_multiprocessing() -> None:
    """Python's default start method, and no forkserver yet, as in a process started by hand.

    The child of a forkserver has "forkserver" as its default, so that loader workers would start a server of their own
    and import torch again; and it has the state, and the held lock, of the one that it was forked from.
    """
    multiprocessing.set_start_method(None, force=True)
    forkserver._forkserver.__init__()  # type: ignore[misc]  # noqa: SLF001 - the module's functions are bound to this very object


def _reseed() -> None:
    """Give the generators seeds of their own, as in processes that torchrun starts.

    Forks share the state of numpy's and torch's CPU generators: every rank of every run would draw the same numbers.
    Python's random does it itself, and CUDA's generators don't exist before the fork.
    """
    import torch

    torch.default_generator.seed()
    # Loaded on first use, with a seed of its own then; a rank should not pay for that.
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


def _limit_threads(count: int) -> None:
    """Share the cores out; OMP_NUM_THREADS has no effect any more in a process that has loaded the libraries."""
    import torch

    torch.set_num_threads(count)
    warm.thread_pools.limit(limits=count)


def _adopt_logging(task: RankTask) -> None:
    """Level of the kernel's root logger; one handler to stderr if the kernel has any, or INFO would be lost."""
    root = logging.getLogger()
    if task.log_format is not None:
        logging.basicConfig(level=task.root_log_level, format=task.log_format)
    root.setLevel(task.root_log_level)


def adopt_matplotlib(backend: str | None) -> None:
    """Draw with the kernel's back end; one that needs a live widget or window becomes the inline one."""
    if backend is None:
        return
    inline = "module://matplotlib_inline.backend_inline"
    needs_window = any(part in backend.lower() for part in _WINDOWED)
    os.environ["MPLBACKEND"] = inline if needs_window else backend
    with contextlib.suppress(ImportError):  # not installed: no backend to set
        if "matplotlib" in sys.modules:
            sys.modules["matplotlib"].use(os.environ["MPLBACKEND"])
