"""Puts right what a message that a subshell handles does to the cell that the main shell runs.

ipykernel treats every message alike: after it, front ends and the server's culler hear "idle", and what threads of the
user print belongs to that message, which no cell shows. A panel that sends a beat every half minute would do that to
every long cell. So after each of ours the main shell's cell is made the current one again, and called busy while it
runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import TYPE_CHECKING, Any

from air_nb.runs.forked import abandon_in_children

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult

__all__ = ["MainShell"]


class MainShell:
    """Knows which cell the main shell runs.

    `watch` and the two events run in the main thread, `message_handled` in the thread of a subshell. The lock orders
    them: "busy" is published while the cell runs, or not at all, so that the cell's own "idle" is always the last word.

    Args:
        shell: The kernel's IPython shell.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._kernel = shell.kernel
        self._lock = threading.Lock()
        self._ident: Any = None
        self._parent: dict[str, Any] = {}
        self._depth = 0  # a cell may run another: %run of a notebook, run_cell
        self._was_disturbed = False
        abandon_in_children(self)

    def watch(self) -> None:
        """From now on; the cell that runs now counts."""
        self._shell.events.register("pre_run_cell", self._began)
        self._shell.events.register("post_run_cell", self._ended)
        if self._shell.get_parent().get("msg_type") == "execute_request":
            self._began(None)

    def unwatch(self) -> None:
        """No longer."""
        self._shell.events.unregister("pre_run_cell", self._began)
        self._shell.events.unregister("post_run_cell", self._ended)
        with self._lock:
            self._depth = 0

    def message_handled(self) -> None:
        """To be called in the handler of a message of ours: puts things right when ipykernel is done with it.

        A callback of the subshell's loop, not a timer: the loop runs it right after the message, "idle" included.
        """
        if threading.current_thread() is threading.main_thread():
            return  # the main shell's own message: no cell runs
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a kernel whose subshells have no event loop
            return
        loop.call_soon(self._put_right)

    def abandon(self) -> None:
        """In a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def _put_right(self) -> None:
        with self._lock:
            if not self._parent:
                return
            # In a context of its own: the parent is set for this subshell otherwise, whose next message is another's.
            contextvars.copy_context().run(self._kernel.set_parent, self._ident, self._parent)
            self._was_disturbed = True
            if self._depth:
                self._kernel._publish_status("busy", "shell", parent=self._parent)  # noqa: SLF001 - no public way

    def _began(self, _info: ExecutionInfo | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # a cell on a subshell
        parent = self._shell.get_parent()
        with self._lock:
            if self._depth and _message_id(parent) == _message_id(self._parent):
                self._depth += 1
                return
            self._ident, self._parent, self._depth = self._kernel._parent_ident["shell"], parent, 1  # noqa: SLF001
            if self._was_disturbed:  # possibly by the cell before, after ipykernel had set this one
                self._kernel.set_parent(self._ident, parent)
                self._was_disturbed = False

    def _ended(self, _result: ExecutionResult | None) -> None:
        if threading.current_thread() is threading.main_thread():
            with self._lock:
                self._depth = max(0, self._depth - 1)


def _message_id(parent: dict[str, Any]) -> Any:
    return parent.get("header", {}).get("msg_id")
