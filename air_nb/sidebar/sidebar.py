"""The kernel's side of the panel as a whole: monitor and hub, what they know of this kernel's runs, and the widget."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from air_nb.monitor.poller import Poller
from air_nb.sidebar.hub import Hub
from air_nb.sidebar.messages import Facts
from air_nb.sidebar.panel_comm import announce, kernel_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from air_nb.monitor.sampler import Sampler
    from air_nb.sidebar.actions import Actions
    from air_nb.sidebar.busy import MainShell

__all__ = ["Sidebar"]

_OPENED = "GPU panel: in the right sidebar of JupyterLab and Notebook 7; `%air sidebar` again closes it"
_NO_WIDGET = "in the output of a cell, for other front ends: pip install 'air_nb[widgets]', then restart the kernel"
_CLOSED = "GPU panel closed; `%air sidebar` opens it"


class Sidebar:
    """See the module.

    Args:
        sampler: Samples the GPUs; the caller goes on owning it.
        actions: What a page may ask for.
        is_run_live: Whether a run of this kernel is live.
        version: Of air_nb.
    """

    def __init__(self, sampler: Sampler, actions: Actions, *, is_run_live: Callable[[], bool], version: str) -> None:
        facts = Facts(kernel_id(), os.getpid(), socket.gethostname(), version)
        self.hub = Hub(actions, facts, is_run_live=is_run_live)
        self._poller = Poller(
            sampler, on_sample=self.hub.on_sample, on_status=self.hub.on_status, is_run_live=is_run_live
        )
        self.hub.attach(self._poller)
        self._widget: Any = None

    def runs_changed(self) -> None:
        """A run of this kernel has started or ended."""
        self._poller.wake()
        self.hub.runs_changed()

    def toggle(self, main_shell: MainShell, text: str) -> str:
        """Open the panel, or close it if a page has it on the screen.

        Args:
            main_shell: Is told of each message of the widget.
            text: What the widget is where there are no widgets.

        Returns:
            What to print; empty if the widget was displayed, which says it.
        """
        if self.hub.is_in_sight():
            announce(hide=True)
            self._close_widget()
            return _CLOSED
        announce(show=True)
        self._close_widget()
        try:
            from air_nb.sidebar.widget import Panel
        except ModuleNotFoundError:
            return f"{_OPENED}\n{_NO_WIDGET}"
        from IPython.display import display

        self._widget = Panel(self.hub, main_shell, text)
        display(self._widget)
        return ""

    def _close_widget(self) -> None:
        widget, self._widget = self._widget, None
        if widget is not None:
            widget.close()

    def close(self) -> None:
        """Take the panel off all pages and end the threads."""
        self._poller.stop()
        self._close_widget()
        self.hub.close()
