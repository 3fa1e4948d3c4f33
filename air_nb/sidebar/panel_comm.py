"""Connects comms to the hub: those that a page opens for its sidebar, and the one of the inline widget.

Imported by ``%load_ext``, so it imports nothing heavy: the hub is made for the first page.
"""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING, Any

from air_nb.sidebar.busy import MainShell

if TYPE_CHECKING:
    from collections.abc import Callable

    from air_nb.sidebar.hub import Hub

__all__ = ["PANEL_TARGET", "PanelOffer", "adapt_comm", "announce", "kernel_id"]

PANEL_TARGET = "air_nb.panel"
_ANNOUNCE_TARGET = "air_nb.announce"


class PanelOffer:
    """The comm target of the panel, from `offer` to `withdraw`.

    Args:
        shell: IPython's shell of a kernel.
        hub: Returns the hub, which it makes for the first page.
    """

    def __init__(self, shell: Any, hub: Callable[[], Hub]) -> None:
        self.main_shell = MainShell(shell)
        self._hub = hub
        self._manager = shell.kernel.comm_manager

    def offer(self) -> None:
        """From now on pages can connect; tell those that listen."""
        self.main_shell.watch()
        self._manager.register_target(PANEL_TARGET, self._accept)
        announce(show=os.environ.get("AIR_NB_SIDEBAR") == "1")

    def withdraw(self) -> None:
        """No longer."""
        if self._manager.targets.get(PANEL_TARGET) == self._accept:
            del self._manager.targets[PANEL_TARGET]
        self.main_shell.unwatch()

    def _accept(self, comm: Any, _message: dict[str, Any]) -> None:
        self.main_shell.message_handled()
        hub = self._hub()
        # A page that is closed or reloaded deletes its subshell, before that has heard any farewell.
        is_there = threading.current_thread().is_alive
        comms = self._manager.comms
        connection = hub.connect(comm.send, comm.close, is_there, lambda: comms.pop(comm.comm_id, None))

        def hung_up(_message: dict[str, Any]) -> None:
            self.main_shell.message_handled()
            hub.disconnect(connection)

        adapt_comm(comm, lambda message: hub.receive(connection, message["content"].get("data")), self.main_shell)
        comm.on_close(hung_up)
        hub.greet(connection)


def adapt_comm(comm: Any, receive: Callable[[dict[str, Any]], None], main_shell: MainShell) -> None:
    """Have what a page says on a comm handled by us, where the page sends it to, with no traces in the running cell.

    Args:
        comm: Of ipykernel.
        receive: Gets each message.
        main_shell: Is told of each.
    """
    if hasattr(comm, "_reply_subshell_for"):
        # ipykernel 7.4 sends what a page says to the shell under which the comm was last used here: for what a thread
        # sends that is the main one, where it would wait for the running cell. None: where the page has sent it to.
        comm._reply_subshell_for = None  # noqa: SLF001 - there is no public way

    def handle(message: dict[str, Any]) -> None:
        main_shell.message_handled()
        receive(message)

    # In place of on_msg, around which IPython's pre_execute and post_execute are triggered: matplotlib would show, and
    # close, the figure that the running cell is drawing.
    comm.handle_msg = handle


def announce(*, show: bool = False, hide: bool = False) -> None:
    """Tell the pages of this kernel that it has a panel; one with our labextension connects.

    Args:
        show: Open the sidebar.
        hide: Close it.
    """
    from comm import create_comm

    create_comm(_ANNOUNCE_TARGET, data={"kernel_id": kernel_id(), "reveal": show, "hide": hide}).close()


def kernel_id() -> str:
    """Jupyter's id of this kernel, by the name of its connection file; empty if it has none."""
    from ipykernel.connect import get_connection_file

    try:
        name = os.path.basename(get_connection_file())  # noqa: PTH119 - pathlib would be one import more
    except RuntimeError:  # embedded into another program
        return ""
    found = re.fullmatch(r"kernel-(.+)\.json", name)
    return found[1] if found else ""
