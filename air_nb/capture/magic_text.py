"""Python inside the text arguments of IPython's calls: ``%time f(x)``, ``!ls {path}``, ``%%timeit``. Pure.

``ip.transform_cell`` turns a magic into a call with constant texts, such as ``get_ipython().run_line_magic('time',
'f(x)')``. Names in other magics' texts can't be known; for these there is ``--in``.
"""

from __future__ import annotations

import ast
import re
import string
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Piece", "pieces"]

# Run their text as Python: in the namespace of the cell, or (timeit, memit) in a function, which leaves no names
# behind.
_INLINE = frozenset({"time", "prun"})
_IN_FUNCTION = frozenset({"timeit", "memit"})
_CODE_MAGICS = _INLINE | _IN_FUNCTION
_INSPECTING = frozenset({"pinfo", "pinfo2", "pdoc", "psource", "pdef", "pfile"})
_SHELL_CALLS = frozenset({"system", "getoutput"})
_DOLLAR = re.compile(r"\$([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class Piece:
    """What one text means for names.

    Attributes:
        code: Python that is run.
        leaves_names: Whether names it assigns stay.
        reads: Names that are expanded into the text.
        assigns: Names that the magic itself assigns.
    """

    code: str = ""
    leaves_names: bool = True
    reads: tuple[str, ...] = ()
    assigns: tuple[str, ...] = field(default=())


def pieces(node: ast.Call, transform: Callable[[str], str]) -> Iterator[Piece]:
    """The Python in the texts of a call that IPython's transformation made, in the order in which it runs.

    Args:
        node: Any call; another one has no pieces.
        transform: ``ip.transform_cell``.
    """
    texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    match node.func:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr=called):
            pass
        case _:
            return
    match called, texts:
        case _, [str() as command] if called in _SHELL_CALLS:
            yield _expanded(command)
        case "run_line_magic", [str() as magic, str() as line, *_]:
            yield from _line_magic(magic, line, transform)
        case "run_cell_magic", [str() as magic, str() as line, str() as body]:
            yield from _cell_magic(magic, line, body, transform)


def _line_magic(magic: str, line: str, transform: Callable[[str], str]) -> Iterator[Piece]:
    if magic in _CODE_MAGICS:
        yield _run(magic, _statement(line, transform))
    elif magic in _INSPECTING:
        yield Piece(reads=tuple(re.findall(r"^\s*([A-Za-z_]\w*)", line)))
    else:
        yield _expanded(line)


def _cell_magic(magic: str, line: str, body: str, transform: Callable[[str], str]) -> Iterator[Piece]:
    if magic in _CODE_MAGICS:
        yield _run(magic, _statement(line, transform) + "\n" + _transformed(body, transform))
    elif magic == "capture":
        yield Piece(code=_transformed(body, transform))
        yield Piece(assigns=tuple(word for word in line.split() if word.isidentifier()))
    else:
        yield _expanded(line)


def _run(magic: str, code: str) -> Piece:
    return Piece(code=code, leaves_names=magic in _INLINE)


def _statement(line: str, transform: Callable[[str], str]) -> str:
    """The code after a magic's options: the longest end of the line that is Python (``-n 3 -o f(x)``: ``f(x)``)."""
    starts = [0, *(match.end() for match in re.finditer(r"\s+", line))] if line.lstrip().startswith("-") else [0]
    for start in starts:
        code = _transformed(line[start:], transform)
        if code and not line[start:].startswith("-"):
            return code
    return ""


def _transformed(text: str, transform: Callable[[str], str]) -> str:
    """Python for IPython's text, empty if it is none."""
    try:
        code = transform(text)
        ast.parse(code)
    except (SyntaxError, ValueError):
        return ""
    return code


def _expanded(text: str) -> Piece:
    """``{expression}`` and ``$name``, which IPython expands in commands and in most magics' lines."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name]
    except ValueError:  # a lone brace, as in awk '{print $1}': IPython then expands nothing
        fields = []
    dollars = tuple(_DOLLAR.findall(text))
    return Piece(code="\n".join(filter(_is_expression, fields)), leaves_names=False, reads=dollars)


def _is_expression(text: str) -> bool:
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return False
    return True
