"""The walk through a cell in the order in which it runs, scope by scope. Pure.

A name counts as read unless it is *certainly* assigned before, so a name too many costs bytes, a name too few would be
a NameError on the rank. Two facts keep this simple: a name that the cell deletes is gone from the notebook's namespace
too, so ``del`` ends no certainty; and a function may be called anywhere after its definition, so what it reads is
judged at its definition.
"""

# ruff: noqa: D102, N815 - ast.NodeVisitor calls methods by the names of the nodes, which say what they do

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from air_nb.capture import magic_text
from air_nb.capture.bindings import Bindings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

__all__ = ["Found", "Scope"]


class Found:
    """What is collected over all scopes of one cell; a dict where order counts."""

    def __init__(self, transform: Callable[[str], str]) -> None:
        self.transform = transform
        self.reads: dict[str, None] = {}
        self.assigns: set[str] = set()


# Managers that let exceptions through: what is assigned in their body is certain afterwards. Others may be like
# contextlib.suppress, after which it is not.
_TRANSPARENT_MANAGERS = frozenset(
    """
    File NamedTemporaryFile Pool ProcessPoolExecutor TemporaryDirectory ThreadPoolExecutor ZipFile autocast
    catch_warnings closing device enable_grad inference_mode no_grad no_sync open profile record_function
    redirect_stderr redirect_stdout set_grad_enabled start_run tqdm
    """.split()
)


class Scope(ast.NodeVisitor):
    """Walks the code of one scope in the order in which it runs.

    ``bound`` is the set of names certainly assigned at this point, None where the code can't be reached. It holds
    global names; in a class body also the names of the class, written ".name" to keep the two apart.
    """

    def __init__(
        self,
        found: Found,
        *,
        bound: Collection[str] = (),
        enclosing: frozenset[str] = frozenset(),
        body: Sequence[ast.stmt] = (),
        kind: str = "module",
    ) -> None:
        self.found = found
        self.bound: set[str] | None = set(bound)
        self.kind = kind
        own = Bindings.of(body) if kind != "module" else Bindings()
        self.globals = own.declared_global
        # Names of enclosing functions and, in a function, its own: always resolved there, never in the notebook.
        self.enclosing = enclosing - own.declared_global
        self.of_class = own.names - own.declared_global if kind == "class" else frozenset[str]()
        self.local = self.enclosing | (own.names - own.declared_global if kind == "function" else frozenset())

    # Names

    def read(self, name: str) -> None:
        """The code loads a name here."""
        if self.bound is None:
            return
        if name in self.of_class:
            # A class body looks in the class, then in the globals, past the functions around it.
            if "." + name in self.bound or name in self.bound:
                return
        elif name in self.local or name in self.bound:
            return
        self.found.reads.setdefault(name)

    def bind(self, name: str) -> None:
        """The code assigns a name here."""
        if name in self.of_class:
            self._certain("." + name)
        elif name not in self.local:
            self.found.assigns.add(name)
            self._certain(name)

    def _certain(self, name: str) -> None:
        if self.bound is not None:
            self.bound.add(name)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.bind(node.id) if isinstance(node.ctx, ast.Store) else self.read(node.id)
        else:
            self.read(node.id)

    # Branches: each starts from the same state; certain afterwards is what all reachable ones agree on

    def run(self, statements: Iterable[ast.AST]) -> None:
        """Walk nodes one after the other."""
        for statement in statements:
            self.visit(statement)

    def _branch(self, nodes: Iterable[ast.AST], start: set[str] | None) -> set[str] | None:
        """The state at the end of a branch that begins with ``start``; the own state stays."""
        before, self.bound = self.bound, None if start is None else set(start)
        self.run(nodes)
        end, self.bound = self.bound, before
        return end

    def _maybe(self, *nodes: ast.AST | None) -> None:
        """Walk what may not run at all."""
        self._branch((node for node in nodes if node is not None), self.bound)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.bound = _agree(self._branch(node.body, self.bound), self._branch(node.orelse, self.bound))

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._maybe(*node.body)
        self._maybe(*node.orelse)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._maybe(node.target, *node.body)
        self._maybe(*node.orelse)

    visit_AsyncFor = visit_For

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.visit(item.optional_vars)
        if all(_called_name(item.context_expr) in _TRANSPARENT_MANAGERS for item in node.items):
            self.run(node.body)
        else:
            self._maybe(*node.body)

    visit_AsyncWith = visit_With

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        start = self.bound
        ends = [self._branch([*node.body, *node.orelse], start)]
        ends += [self._branch([handler], start) for handler in node.handlers]
        # The last block runs in any case, after any part of the others.
        final = self._branch(node.finalbody, start)
        after = _agree(*ends)
        self.bound = None if after is None or final is None else after | final

    visit_TryStar = visit_Try

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name is not None:
            self.bind(node.name)
        self.run(node.body)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        ends = [self._branch([case], self.bound) for case in node.cases]
        last = node.cases[-1]
        takes_all = last.guard is None and isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
        self.bound = _agree(*ends) if takes_all else _agree(*ends, self.bound)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.generic_visit(node)
        if node.name is not None:
            self.bind(node.name)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name is not None:
            self.bind(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.generic_visit(node)
        if node.rest is not None:
            self.bind(node.rest)

    def _leave(self, node: ast.AST) -> None:
        self.generic_visit(node)
        self.bound = None

    visit_Return = visit_Raise = visit_Break = visit_Continue = _leave

    def visit_Assert(self, node: ast.Assert) -> None:
        self._maybe(node.test, node.msg)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._maybe(*node.values[1:])

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self.bound = _agree(self._branch([node.body], self.bound), self._branch([node.orelse], self.bound))

    def visit_Compare(self, node: ast.Compare) -> None:
        self.run([node.left, node.comparators[0]])
        self._maybe(*node.comparators[1:])

    # Assignments: the value is computed before the target is bound

    def visit_Assign(self, node: ast.Assign) -> None:
        self.run([node.value, *node.targets])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.read(node.target.id)
        self.run([node.value, node.target])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if self.kind != "function":
            self.visit(node.annotation)
        if node.value is not None:
            self.run([node.value, node.target])
        elif not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.run([node.value, node.target])

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name != "*":
                self.bind(alias.asname or alias.name.partition(".")[0])

    visit_ImportFrom = visit_Import

    # Scopes inside

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.run([*node.decorator_list, *_defaults(node.args)])
        generic = self._generic(node)
        generic.run(argument.annotation for argument in _arguments(node.args) if argument.annotation is not None)
        if node.returns is not None:
            generic.visit(node.returns)
        if not node.decorator_list:
            self.bind(node.name)  # before the body, which runs later: a function may call itself
        generic.call(node.body, _arguments(node.args))
        self.bind(node.name)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.run(_defaults(node.args))
        self.call([ast.Expr(node.body)], _arguments(node.args))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.run(node.decorator_list)
        generic = self._generic(node)
        generic.run([*node.bases, *(keyword.value for keyword in node.keywords)])
        inner = generic.inside("class", node.body)
        inner.run(node.body)
        # The body has run by now: what it declared global and assigned is as certain as if it stood here.
        self.bound = None if inner.bound is None or self.bound is None else self.bound | _globals(inner.bound)
        self.bind(node.name)

    def visit_TypeAlias(self, node: Any) -> None:
        """``type X[T] = ...`` (Python 3.12): the value is computed when asked for."""
        self.bind(node.name.id)
        self._generic(node).inside("function").visit(node.value)

    def _generic(self, node: Any) -> Scope:
        """The scope of the type parameters of a definition (Python 3.12), this one if it has none."""
        parameters = getattr(node, "type_params", [])  # absent before Python 3.12
        if not parameters:
            return self
        scope = self.inside("function", names=(parameter.name for parameter in parameters))
        for parameter in parameters:
            scope.generic_visit(parameter)
        return scope

    def inside(self, kind: str, body: Sequence[ast.stmt] = (), names: Iterable[str] = ()) -> Scope:
        """A scope inside this one, as of now.

        Args:
            kind: "class" or "function".
            body: Its statements, for the names that they bind.
            names: That it has besides.
        """
        bound = _globals(self.bound or set())
        scope = Scope(self.found, bound=bound, enclosing=self.local.union(names), body=body, kind=kind)
        if self.bound is None:
            scope.bound = None
        return scope

    def call(self, body: Sequence[ast.stmt], arguments: Iterable[ast.arg] = ()) -> None:
        """Walk the body of a function as if it were called now."""
        self.inside("function", body, (argument.arg for argument in arguments)).run(body)

    def _comprehension(self, node: Any, *results: ast.expr) -> None:
        """The first iterable belongs to the scope around, all else has the targets as its own names."""
        self.visit(node.generators[0].iter)
        targets = Bindings.of([generator.target for generator in node.generators])
        scope = self.inside("function", names=targets.names)
        for index, generator in enumerate(node.generators):
            if index:
                scope.visit(generator.iter)
            scope.visit(generator.target)
            scope.run(generator.ifs)
        scope.run(results)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._comprehension(node, node.elt)

    visit_SetComp = visit_GeneratorExp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node, node.key, node.value)

    # IPython

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        for piece in magic_text.pieces(node, self.found.transform):
            for name in piece.reads:
                self.read(name)
            tree = _parse_or_none(piece.code)
            if tree is not None and piece.leaves_names:
                self.run(tree.body)
            elif tree is not None:
                self.call(tree.body)
            for name in piece.assigns:
                self.bind(name)


def _agree(*ends: set[str] | None) -> set[str] | None:
    """Certain after several branches; one that can't be left (a raise, a return) has no say."""
    reachable = [end for end in ends if end is not None]
    return set.intersection(*reachable) if reachable else None


def _globals(bound: set[str]) -> set[str]:
    return {name for name in bound if not name.startswith(".")}


def _arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None)


def _defaults(arguments: ast.arguments) -> Iterator[ast.expr]:
    yield from arguments.defaults
    yield from (default for default in arguments.kw_defaults if default is not None)


def _called_name(node: ast.expr) -> str | None:
    """``open`` of ``open(p)``, ``no_grad`` of ``torch.no_grad()``."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
        case _:
            return None


def _parse_or_none(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError):
        return None
