"""The panel as a widget in a cell's output, for pages without our labextension. The only user of anywidget.

With the labextension it is one line with a button: the same module finds ``window.airNb`` and leaves the rest to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
from traitlets import Unicode

from air_nb.sidebar.panel_comm import adapt_comm, kernel_id

if TYPE_CHECKING:
    from air_nb.sidebar.busy import MainShell
    from air_nb.sidebar.connection import Connection
    from air_nb.sidebar.hub import Hub

__all__ = ["Panel"]

_STATIC = Path(__file__).parent / "static"


class Panel(anywidget.AnyWidget):
    """See the module.

    Args:
        hub: Serves it, from the first message of a page on: a notebook that is run without one sends it nothing.
        main_shell: Is told of each message.
        text: For where there are no widgets.
    """

    # The text, not the path: anywidget would start a thread that watches the file where watchfiles is installed.
    _esm = (_STATIC / "panel.js").read_text(encoding="utf-8")
    _css = (_STATIC / "panel.css").read_text(encoding="utf-8")

    kernel_id = Unicode().tag(sync=True)

    def __init__(self, hub: Hub, main_shell: MainShell, text: str) -> None:
        self._hub = hub
        self._main_shell = main_shell
        self._text = text
        self._connection: Connection | None = None
        super().__init__(kernel_id=kernel_id())
        self.on_msg(self._receive)

    def open(self) -> None:
        """Open the comm (ipywidgets calls this)."""
        super().open()
        adapt_comm(self.comm, self._handle_msg, self._main_shell)

    def close(self) -> None:
        """Take it off the page."""
        connection, self._connection = self._connection, None
        super().close()
        if connection is not None:
            self._hub.disconnect(connection)

    def _receive(self, _widget: object, content: object, _buffers: object) -> None:
        if self.comm is None:
            return
        if self._connection is None or not self._connection.is_open:
            self._connection = self._hub.connect(self.send, self.close)
            self._hub.greet(self._connection)
            if isinstance(content, dict) and content.get("type") == "resync":
                return
        self._hub.receive(self._connection, content)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        bundle: tuple[dict[str, Any], dict[str, Any]] | None = super()._repr_mimebundle_(**kwargs)
        return bundle and ({**bundle[0], "text/plain": self._text}, *bundle[1:])
