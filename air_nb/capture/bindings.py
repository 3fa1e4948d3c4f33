"""Names that the body of a function or class makes its own. Pure."""

# ruff: noqa: D102, N815 - ast.NodeVisitor calls methods by the names of the nodes, which say what they do

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Bindings"]


class Bindings(ast.NodeVisitor):
    """Names that a function or class body assigns, its nested scopes aside."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._global: set[str] = set()
        self._nonlocal: set[str] = set()

    @classmethod
    def of(cls, nodes: Iterable[ast.AST]) -> Bindings:
        """Those of a body."""
        found = cls()
        for node in nodes:
            found.visit(node)
        return found

    @property
    def names(self) -> frozenset[str]:
        """What is assigned, unless a scope around owns it."""
        return frozenset(self._names - self._nonlocal)

    @property
    def declared_global(self) -> frozenset[str]:
        """What a ``global`` statement names."""
        return frozenset(self._global)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._names.add(node.id)

    def visit_Global(self, node: ast.Global) -> None:
        self._global.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self._nonlocal.update(node.names)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self._names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)

    visit_ImportFrom = visit_Import

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._add(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        self._add(node.name)
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._add(node.rest)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._add(node.name)
        for decorator in node.decorator_list:
            self.visit(decorator)

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """A scope of its own."""

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        # Its targets are its own, but `:=` inside binds around it.
        self._names.update(
            inner.target.id
            for inner in ast.walk(node)
            if isinstance(inner, ast.NamedExpr) and isinstance(inner.target, ast.Name)
        )

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def _add(self, name: str | None) -> None:
        if name is not None:
            self._names.add(name)
