"""The user's session: owns the launcher, the GPU sampler and the tracking process.

One per process, made on first use. Every launch runs on the thread that asked for it and blocks it until no process of
the run is left; several threads may launch at a time. Threads of its own: the readers of the launcher
(``launch.client``) and of the tracking process (``tracking.client``), and ``air_nb-prepare``, which ends as soon as it
has imported the rest of the package, tidied up, and started the tracking process.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from air_nb.errors import LauncherError, NestedLaunchError
from air_nb.launch.client import LauncherClient
from air_nb.launch.key import changed, current_key
from air_nb.monitor.sampler import Sampler
from air_nb.runs.forked import abandon_in_children
from air_nb.tracking.client import TrackingClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from IPython.core.interactiveshell import InteractiveShell

    from air_nb.options import RunOptions
    from air_nb.session.launched import Launch
    from air_nb.session.tracked import Tracked
    from air_nb.session.ui import MlflowPages
    from air_nb.sidebar.sidebar import Sidebar

__all__ = ["Session", "close_session", "get_session"]

_log = logging.getLogger(__name__)

_WARM_TIMEOUT_S = 60.0
_EXIT_S = 30.0  # a script, with all that it has logged, may be shorter than the import of MLflow
_KERNEL_EXIT_S = 1.5  # a kernel that shuts down is killed after 2.5 s


class Session:
    """See the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launcher: LauncherClient | None = None
        self._sampler = Sampler()
        self._tracking = TrackingClient()
        self._pages: MlflowPages | None = None
        self._said: set[str] = set()
        self._unsettled: list[Tracked] = []
        self._sidebar: Sidebar | None = None
        self._live_runs = 0
        self._is_closed = False
        abandon_in_children(self)
        atexit.register(self._finish_tracking)

    @property
    def sampler(self) -> Sampler:
        """Samples the GPUs of this machine."""
        return self._sampler

    @property
    def tracking(self) -> TrackingClient:
        """The tracking process."""
        return self._tracking

    @property
    def pages(self) -> MlflowPages:
        """MLflow's pages, for ``%air ui``; made on first use."""
        from air_nb.session.ui import MlflowPages

        with self._lock:
            self._pages = self._pages or MlflowPages()
            return self._pages

    @property
    def sidebar(self) -> Sidebar:
        """The GPU panel, made for the first page or the first run; only in a kernel."""
        from air_nb.session.panel import PanelActions
        from air_nb.sidebar.sidebar import Sidebar

        with self._lock:
            if self._sidebar is None:
                self._sidebar = Sidebar(
                    self._sampler,
                    PanelActions(self),
                    is_run_live=lambda: self._live_runs > 0,
                    version=sys.modules["air_nb"].__version__,  # it is above this module
                )
            return self._sidebar

    @contextmanager
    def live_run(self) -> Iterator[None]:
        """Around a run of this kernel: the panel shows it at once, and its history goes on unseen."""
        with self._lock:
            self._live_runs += 1
        try:
            self._tell_sidebar()
            yield
        finally:
            with self._lock:
                self._live_runs -= 1
            self._tell_sidebar()

    def _tell_sidebar(self) -> None:
        if not _is_kernel() or self._is_closed:
            return
        try:
            self.sidebar.runs_changed()
        except Exception:  # noqa: BLE001 - the border: no trouble of the panel may fail a run, or lose its values
            _log.warning("the panel could not be told of a run", exc_info=True)

    @property
    def launcher(self) -> LauncherClient | None:
        """The warm launcher, if there is one."""
        return self._launcher

    def warm(self) -> None:
        """Start launcher, sampler and tracking process, and tidy up, in the background; returns at once."""
        with self._lock:
            if self._launcher is None or not self._launcher.is_alive:
                self._launcher = LauncherClient(os.environ)
        self._sampler.start()
        threading.Thread(target=_prepare, args=(self,), name="air_nb-prepare", daemon=True).start()

    def close(self) -> None:
        """End the launcher and all below it, the sampler, and the tracking process when it has sent everything."""
        atexit.unregister(self._finish_tracking)
        with self._lock:
            self._is_closed = True  # a run that ends by this must not make another sidebar
            launcher, self._launcher = self._launcher, None
            sidebar, self._sidebar = self._sidebar, None
        if sidebar is not None:
            sidebar.close()
        if launcher is not None:
            launcher.close()
        self._sampler.close()
        self._tracking.close()
        if self._pages is not None:
            self._pages.close()

    def abandon(self) -> None:
        """In a forked child of the kernel: forget the launcher and the runs, which are the parent's."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._launcher = None
        self._unsettled = []
        self._sidebar = None
        self._live_runs = 0

    def watch_tracking(self, tracked: Tracked) -> None:
        """Keep an eye on the MLflow run of a launch that has ended before MLflow has answered."""
        with self._lock:
            self._unsettled.append(tracked)

    def late_warnings(self) -> list[str]:
        """What has become known of MLflow since launches ended, one sentence each."""
        with self._lock:
            for tracked in self._unsettled:
                tracked.poll()
            texts = [text for tracked in self._unsettled for text in tracked.warnings()]
            self._unsettled = [tracked for tracked in self._unsettled if not tracked.is_settled]
        return texts

    def _finish_tracking(self) -> None:
        """At exit: the tracking process outlives this one for a moment only, which may be too short."""
        is_kernel = _is_kernel()
        with suppress(KeyboardInterrupt):  # whoever does not want to wait
            self._tracking.wait_all_ended(_KERNEL_EXIT_S if is_kernel else _EXIT_S)
        if not is_kernel:  # where nobody would see it
            sys.stderr.writelines(f"{text}\n" for text in self.late_warnings())

    def run(self, launch: Launch, options: RunOptions, shell: InteractiveShell | None) -> list[dict[str, Any]]:
        """Run on every rank and wait.

        Returns:
            One dict of values per rank, index = rank: what ``task.out``, ``task.pull`` or a function's return produced.

        Raises:
            NestedLaunchError: This process is a rank.
            CaptureError: A name can't be sent; nothing was started.
            DeviceError: The devices are not there; nothing was started.
            RankFailedError: A rank failed.
            KeyboardInterrupt: The run was interrupted; no process of it is left.
        """
        if "AIR_NB_RUN_ID" in os.environ:
            msg = "this is a rank already: a run can't be started inside a run"
            raise NestedLaunchError(msg)
        # Here, not at the top: %load_ext has to be quick, and this is half of the package.
        from air_nb.session.launched import run_launch

        with self.live_run():
            return run_launch(self, launch, options, shell)

    def once(self, text: str) -> str:
        """The text, at the first call with it; empty after that."""
        with self._lock:
            new = text not in self._said
            self._said.add(text)
        return text if new else ""

    def borrow_launcher(self, *, cold: bool) -> tuple[LauncherClient, str]:
        """A launcher for the environment as it is now, to be given back, and a note if a new one had to be started."""
        with self._lock:
            if self._is_closed:
                msg = "the extension was unloaded: %load_ext air_nb"
                raise LauncherError(msg)
            why = self._why_new_launcher(cold=cold)
            if self._launcher is None or why:
                if self._launcher is not None:
                    self._launcher.retire()
                self._launcher = LauncherClient(os.environ)
            self._launcher.borrow()
            return self._launcher, why and f"{why}: new launcher"

    def _why_new_launcher(self, *, cold: bool) -> str:
        old = self._launcher
        if old is None:
            return ""
        if not old.is_alive or old.problem is not None:
            return "the launcher had ended"
        if cold:
            return "--cold"
        names = changed(old.key, current_key())
        return f"{', '.join(names)} changed" if names else ""


def _is_kernel() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _prepare(session: Session) -> None:
    """Import what the first launch needs, close the records of runs that died with their kernel, delete the oldest.

    Then, when the launcher is warm, start the tracking process: MLflow takes seconds of CPU to import, which the first
    cell must not share the machine with.
    """
    from air_nb.capture import names
    from air_nb.runs.retention import close_dead_runs, prune
    from air_nb.session import launched
    from air_nb.session.mlflow_state import has_mlflow, is_switched_off
    from air_nb.session.upload import close_left_open

    assert names is not None
    assert launched is not None
    if _is_kernel():
        assert session.sidebar is not None  # made, not started: the first run does that
    with suppress(OSError):  # no home to write to: the first launch says so, and where
        close_dead_runs()
        prune()
    launcher = session.launcher
    if launcher is not None and has_mlflow() and not is_switched_off():
        launcher.wait_ready(_WARM_TIMEOUT_S)
        session.tracking.start()
        with suppress(OSError):
            close_left_open(session)


_session: Session | None = None
_session_lock = threading.Lock()


def get_session() -> Session:
    """The session of this process; made on first use."""
    global _session  # noqa: PLW0603 - one per process is the point
    with _session_lock:
        if _session is None:
            _session = Session()
        return _session


def close_session() -> None:
    """End the session; the next ``get_session`` makes a new one."""
    global _session
    with _session_lock:
        session, _session = _session, None
    if session is not None:
        session.close()
