"""The IPython shell that runs a cell on a rank.

It is built once in the forkserver, where nothing may start a thread, open a database or write a profile, and used by
the one rank that is forked from it. Output goes to the rank's files, failures are returned and not printed.
"""

from __future__ import annotations

import ast
import base64
import linecache
import sys
import types
from typing import TYPE_CHECKING, Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from air_nb.rank.keyboard import refuse_keyboard
from air_nb.rank.tracebacks import users_part

if TYPE_CHECKING:
    from air_nb.rank.stdio import EventLog

__all__ = ["RankShell", "build_shell"]

_NESTED = "%%distributed: this is a rank already, a run can't be started inside a run"


class _CellCompiler(CachingCompiler):
    """Keeps the line numbers that the user sees: lines above the cell's code (``%%distributed``) count."""

    header = ""

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> ast.AST:
        tree: ast.AST = super().ast_parse(source, filename, symbol)
        if self.header and filename in self._filename_map:
            ast.increment_lineno(tree, self.header.count("\n"))
        return tree

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        name: str = super().cache(transformed_code, number, raw_code)
        if self.header:
            text = self.header + transformed_code
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        return name

    def name_sources(self, sources: dict[str, str], cell_numbers: dict[str, int]) -> None:
        """Make code of the notebook's other cells visible to tracebacks, ``inspect`` and ``torch.jit``."""
        for name, text in sources.items():
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        self._filename_map.update(cell_numbers)


class _RankDisplayPublisher(DisplayPublisher):
    """Writes rich messages to the rank's event log."""

    events: EventLog

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,  # noqa: ARG002 - deprecated in IPython
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_ignored: Any,
    ) -> None:
        kind = "update_display_data" if update else "display_data"
        self.events.rich(kind, data=_as_json(data), metadata=metadata or {}, id=(transient or {}).get("display_id"))

    def clear_output(self, wait: bool = False) -> None:  # noqa: FBT001, FBT002 - IPython's signature
        self.events.rich("clear_output", wait=wait)


class _RankDisplayHook(DisplayHook):
    """Keeps the last expression's value for ``--out`` and echoes it otherwise."""

    events: EventLog
    keep_only = False
    source = ""
    value: Any = None

    def __call__(self, result: Any = None) -> None:
        self.check_for_underscore()
        self.value = result
        if result is None:
            return
        self.update_user_ns(result)
        self.fill_exec_result(result)
        if not self.keep_only and not self.quiet():
            data, metadata = self.compute_format_data(result)
            self.events.rich("execute_result", data=_as_json(data), metadata=metadata)

    def quiet(self) -> bool:
        """Tell whether the cell ends in ``;``. IPython looks that up in the history, and a rank has none."""
        return bool(self.semicolon_at_end_of_expression(self.source))


def _as_json(data: dict[str, Any]) -> dict[str, Any]:
    """Binary data (figures) base64-encoded, as Jupyter's messages have it."""
    return {
        mime: base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
        for mime, value in data.items()
    }


class RankShell(InteractiveShell):
    """An IPython shell without history, profile, completer and keyboard."""

    display_pub_class = Type(_RankDisplayPublisher)
    displayhook_class = Type(_RankDisplayHook)
    compiler_class = Type(_CellCompiler)
    display_pub: _RankDisplayPublisher
    displayhook: _RankDisplayHook
    compile: _CellCompiler

    def init_ipython_dir(self, ipython_dir: str) -> None:
        """No profile: nothing is written to the user's home."""

    def init_profile_dir(self, profile_dir: Any) -> None:
        """No profile: nothing is written to the user's home."""

    def init_completer(self) -> None:
        """Nobody types here."""

    def init_pdb(self) -> None:
        """Nobody debugs here."""

    def enable_gui(self, gui: str | None = None) -> None:
        """No event loop to join."""

    def ask_exit(self) -> None:
        """`exit` ends the cell by SystemExit, which the rank reports."""

    def showtraceback(self, *args: Any, **kwargs: Any) -> None:
        """Not printed: the rank reports its failure, and the kernel shows the one that matters."""

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        """Not printed, as above."""

    def attach(self, events: EventLog) -> None:
        """Send rich output to the rank's event log."""
        self.display_pub.events = events
        self.displayhook.events = events

    def format_failure(self, error: BaseException) -> str:
        """The traceback as IPython shows it, with the user's frames only."""
        trace = users_part(error)
        if isinstance(error, SyntaxError):
            lines = self.SyntaxTB.structured_traceback(type(error), error, None)
        else:
            lines = self.InteractiveTB.structured_traceback(type(error), error, trace, tb_offset=0)
        return "\n".join(lines)


def build_shell() -> RankShell:
    """The shell of this process, with a fresh ``__main__`` as its namespace."""
    main = types.ModuleType("__main__", "The namespace of the cell.")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    config = Config()
    config.HistoryManager.enabled = False  # its sqlite file and its thread must not exist before a fork
    config.HistoryManager.hist_file = ":memory:"
    shell: RankShell = RankShell.instance(config=config, user_module=main)
    magics = shell.magics_manager
    magics.register_function(refuse_keyboard, "line_cell", "debug")
    magics.register_function(_refuse_launch, "cell", "distributed")
    return shell


def _refuse_launch(_line: str, _cell: str) -> None:
    raise UsageError(_NESTED)
