"""Which names a cell reads from the notebook, found in its text. Pure: nothing is run, nothing looked up."""

from __future__ import annotations

import ast
import builtins
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from air_nb.capture.scopes import Found, Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["CellNames", "cell_names", "select_names"]


@dataclass(frozen=True, slots=True)
class CellNames:
    """What the text of a cell says about names.

    Attributes:
        reads: Names that it may read from outside, in order of appearance; builtins are among them.
        assigns: Names that it may leave behind at its top level.
        ends_with_expression: Whether its last statement has a value.
    """

    reads: tuple[str, ...]
    assigns: frozenset[str]
    ends_with_expression: bool


def cell_names(cell: str, transform: Callable[[str], str]) -> CellNames:
    """Find the names that a cell reads and assigns.

    Args:
        cell: Its text, with IPython's syntax.
        transform: IPython's ``ip.transform_cell``: magics and ``!commands`` become calls.

    Raises:
        SyntaxError: The cell does not compile.
    """
    tree = _parse(transform(cell))
    found = Found(transform)
    Scope(found).run(tree.body)
    ends_with_expression = bool(tree.body) and isinstance(tree.body[-1], ast.Expr)
    return CellNames(tuple(found.reads), frozenset(found.assigns), ends_with_expression)


# Set in every module by Python itself; a rank's module has its own.
_MODULE_NAMES = frozenset(
    {"__name__", "__doc__", "__package__", "__loader__", "__spec__", "__builtins__", "__builtin__"}
)


def select_names(reads: Iterable[str], namespace: Mapping[str, Any], *, hidden: Mapping[str, Any]) -> tuple[str, ...]:
    """Those names that are the user's.

    Args:
        reads: As found by ``cell_names``.
        namespace: The notebook's (``ip.user_ns``).
        hidden: IPython's own names with its objects (``ip.user_ns_hidden``). A name that the user has bound anew
            counts.
    """
    absent = object()

    def is_users(name: str) -> bool:
        value = namespace.get(name, absent)
        return (
            value is not absent
            and name not in _MODULE_NAMES
            and not (name in hidden and hidden[name] is value)
            and vars(builtins).get(name, absent) is not value
        )

    return tuple(name for name in reads if is_users(name))


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again, once, when the cell runs
        try:
            # Compiling finds what parsing does not: a return outside a function, a name both local and global.
            compile(source, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            return ast.parse(source, "<cell>")
        except SyntaxError as error:
            if error.text is None and error.lineno is not None:  # the compiler looks for the line in a file
                error.text = source.splitlines()[error.lineno - 1]
            raise
