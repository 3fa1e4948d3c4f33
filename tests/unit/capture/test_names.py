"""Which names a cell reads: the rules one by one, then generated programs that run with nothing but what was found."""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from air_nb.capture.names import cell_names, select_names

_transform = TransformerManager().transform_cell
_ALWAYS = {*vars(builtins), "get_ipython"}


def _reads(cell: str) -> set[str]:
    return set(cell_names(cell, _transform).reads) - _ALWAYS


_READS = {
    # straight lines
    "x": "x",
    "x = 1\nx": "",
    "x = x": "x",
    "x += 1": "x",
    "x = 0\nx += y": "y",
    "x.a = 1": "x",
    "x[i] = 1": "x i",
    "x.a += 1": "x",
    "a, *b = c\na, b": "c",
    "del x": "x",
    "del x.a, y[0]": "x y",
    "x: T = y": "T y",
    "x: T\nx": "T x",
    "import x.y, z as w\nx, w": "",
    "import x.y as z\nx": "x",
    "from m import x\nx": "",
    "from m import *\nx": "x",
    "global x\nx": "x",
    "await f(x)": "f x",
    # branches
    "if a: x = 1\nelse: x = 2\nx": "a",
    "if a: x = 1\nx": "a x",
    "if a: x = 1\nelif b: x = 2\nelse: raise E\nx": "a b E",
    "for x in y: z = x\nx, z": "y x z",
    "for x in y: x\nelse: x": "y x",
    "while a:\n    if b: break\n    x = 1\nx": "a b x",
    "while (x := f()): x\nx": "f",
    "try:\n    import x\nexcept ImportError:\n    x = None\nx": "",
    "try:\n    x = f()\nexcept E as e:\n    e\nx": "f E x",
    "try:\n    x = f()\nexcept E:\n    raise\nx": "f E",
    "try:\n    x = f()\nexcept E: x\nfinally:\n    x\n    y = 1\ny": "f E x",
    "try: f()\nexcept E: x = 1\nelse: x = 2\nx": "f E",
    "with open(p) as f: x = f.read()\nf, x": "p",
    "with torch.no_grad(): x = 1\nx": "torch",
    "with suppress(E): x = f()\nx": "suppress E f x",
    "match a:\n    case C(b=x): x\n    case [y, *z]: y, z\n    case {'k': v, **r}: v, r\n    case _ if g: g": "a C g",
    "match a:\n    case 1: x = 1\n    case _: x = 2\nx": "a",
    "match a:\n    case 1: x = 1\nx": "a x",
    "x = 1 if a else (y := 2)\ny": "a y",
    "a and (x := 1)\nx": "a x",
    "a < (x := b) < (y := c)\nx, y": "a b c y",
    "assert (x := a)\nx": "a x",
    "if False: raise E\nx": "E x",
    "raise E\nx": "E",
    # scopes
    "def f(a, b=c, *d, e=g, **h): return a, b, d, e, h, i": "c g i",
    "def f(a: T, *b: U) -> R: a: V = 1": "T U R",
    "@d(a)\ndef f(): f()": "d a f",
    "def f(): f()": "",
    "def f(): x\nx = 1\nf()": "x",
    "x = 1\ndef f(): x": "",
    "def f():\n    x = 1\n    def g():\n        def h(): return x, y\n        return h": "y",
    "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = y": "y",
    "def f():\n    global x\n    x = 1\n    return x": "",
    "def f():\n    global x\n    x += 1": "x",
    "x = 1\ndef f():\n    global x\n    return x": "",
    "def f():\n    x = 1\n    def g():\n        global x\n        return x": "x",
    "def f():\n    import a.b, c as d\n    for e in (): pass\n    with o as g: pass\n    return a, d, e, g": "o",
    "def f():\n    try: pass\n    except E as e: e\n    (w := 1)\n    [v := 2 for _ in ()]\n    return w, v": "E",
    "def f():\n    match a:\n        case [x, *y] | {'a': x, **y}: return x, y": "a",
    "def f():\n    def g(): pass\n    class C: pass\n    return g, C": "",
    "def f():\n    yield x": "x",
    "async def f():\n    async for a in b:\n        async with c as d: await d": "b c",
    "lambda a, b=c: a + b + d": "c d",
    "lambda: (x := 1) + x": "",
    "class A(B, metaclass=M): pass": "B M",
    "class A:\n    x = 1\n    y = x\n    def m(self): return x, A": "x A",
    "class A:\n    x = x": "x",
    "def f():\n    x = 1\n    class A:\n        x = x": "x",
    "def f():\n    x = 1\n    class A:\n        y = x": "",
    "class A:\n    x = [1]\n    y = [x for z in x]": "x",
    "class A:\n    global g\n    g = 1\ng": "",
    "[x for x in y if z]": "y z",
    "[x for a in b for x in a]": "b",
    "{k: v for k, v in d.items()}\nk": "d k",
    "(x for x in x)": "x",
    "[y for x in xs if (y := f(x))]\ny": "xs f y",
    "f'{x!r:>{w}} {y}'": "x w y",
    # IPython
    "%time x = f(y)\nx": "f y",
    "%timeit -n 3 -r 1 f(x)": "f x",
    "%timeit x = f(y)\nx": "f y x",
    "r = %timeit -o f(x)\nr": "f x",
    "%prun -l 10 f(x)": "f x",
    "%%time\nx = a\n!echo {b} {c[0]} $d": "a b c d",
    "%%timeit s = a\nf(s)": "a f",
    "%%capture out\nx = a\nout": "a out",
    "%%capture out\nx = a": "a",
    "x = !ls {p} $q\nx": "p q",
    "!!ls {p + '/x'}": "p",
    "!awk '{print $1}' f": "",
    "%cd {d}": "d",
    "for i in a:\n    %time g(i)\n    !echo {i}": "a g",
    "obj?": "obj",
    "%%bash -s $x\necho $y": "x",
    "exec('x'); eval('y')": "",
    "": "",
    "# nothing": "",
}


@pytest.mark.parametrize("cell", _READS)
def test_reads(cell):
    assert _reads(cell) == set(_READS[cell].split())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="syntax of Python 3.12")
@pytest.mark.parametrize(
    "cell, expected",
    [
        ("def f[T: B](a: T) -> list[T]: return T, x", "B x"),
        ("class A[T](B[T]):\n    y: T\n    def m(self): return T", "B"),
        ("type X[T] = dict[T, Y]\nX", "Y"),
    ],
)
def test_reads_type_parameters(cell, expected):
    assert _reads(cell) == set(expected.split())


def test_reads_are_in_order_of_appearance():
    assert cell_names("b, a\nc\na", _transform).reads == ("b", "a", "c")


@pytest.mark.parametrize(
    "cell, assigns",
    [
        ("x = 1\nif a: y = 2\nfor z in a: w = 1", "x y z w"),
        ("import a.b, c as d\ndef f(): local = 1\nclass C: inner = 1", "a d f C"),
        ("def f():\n    global g\n    g = 1", "f g"),
        ("%time x = 1", "x"),
        ("%timeit x = 1", ""),
        ("x = !ls", "x"),
        ("%%capture out\ny = 1", "out y"),
        ("[(n := a) for a in b]", "n"),
    ],
)
def test_assigns(cell, assigns):
    assert cell_names(cell, _transform).assigns == set(assigns.split())


@pytest.mark.parametrize(
    "cell, ends",
    [
        ("x", True),
        ("f(x);", True),
        ("x = 1", False),
        ("x\ny = 1", False),
        ("", False),
        ("%time f()", True),
        ("if a: x", False),
    ],
)
def test_ends_with_expression(cell, ends):
    assert cell_names(cell, _transform).ends_with_expression is ends


@pytest.mark.parametrize("cell", ["x = ", "a\nreturn 1", "x =\n!ls", "break", "x = f(]"])
def test_a_cell_that_does_not_compile_is_a_syntax_error_with_its_line(cell):
    with pytest.raises(SyntaxError) as caught:
        cell_names(cell, _transform)
    assert caught.value.text
    assert caught.value.text.strip() in cell


def test_an_error_without_a_place_is_a_syntax_error_too():
    with pytest.raises(SyntaxError):
        cell_names("def f(x):\n    global x", _transform)


@pytest.mark.filterwarnings("error")
def test_warnings_are_left_to_the_run():
    cell_names("1 is 1\n'\\d'", _transform)


class TestSelect:
    def test_what_does_not_exist_or_is_a_builtin_stays(self):
        namespace = {"a": 1, "len": len, "sum": "mine", "__name__": "__main__"}
        assert select_names(["a", "b", "len", "sum", "print", "__name__"], namespace, hidden={}) == ("a", "sum")

    def test_names_of_the_shell_stay_unless_bound_anew(self):
        shells: dict[str, Any] = {"In": [], "_": 1000.5, "exit": object(), "get_ipython": object()}
        namespace = shells | {"_": "mine"}
        assert select_names(list(shells), namespace, hidden=shells) == ("_",)

    def test_a_name_bound_to_none_counts(self):
        assert select_names(["x"], {"x": None}, hidden={"x": 1}) == ("x",)


# Programs

_names = st.sampled_from("abcdef")


def _expressions() -> st.SearchStrategy[str]:
    leaves = _names | st.integers(0, 3).map(str)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds("({} + {})".format, inner, inner),
            st.builds("({} if {} else {})".format, inner, inner, inner),
            st.builds("({} and {})".format, inner, inner),
            st.builds("(0 < {} < {})".format, inner, inner),
            st.builds("({} := {})".format, _names, inner),
            st.builds("sum([{} for {} in range({} % 3) if {}])".format, inner, _names, inner, inner),
            st.builds("(lambda {}=1: {})()".format, _names, inner),
            st.builds("len(f'{{{}}}')".format, _names),
            st.builds("{}()".format, _names),
        ),
        max_leaves=4,
    )


def _indent(block: str) -> str:
    return "\n".join("    " + line for line in block.splitlines())


def _statements() -> st.SearchStrategy[str]:
    expression = _expressions()
    simple = st.one_of(
        st.builds("{} = {}".format, _names, expression),
        st.builds("{} += {}".format, _names, expression),
        st.builds("{}: int = {}".format, _names, expression),
        st.builds("{}, {} = {}, {}".format, _names, _names, expression, expression),
        st.builds("del {}".format, _names),
        st.builds("import math as {}".format, _names),
        expression,
        st.just("raise ValueError"),
        st.builds("assert {}".format, expression),
    )

    def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        block = st.lists(inner, min_size=1, max_size=3).map("\n".join).map(_indent)
        return st.one_of(
            st.builds("if {}:\n{}\nelse:\n{}".format, expression, block, block),
            st.builds("if {}:\n{}".format, expression, block),
            st.builds(
                "for {} in range({} % 3):\n{}\n    if {}: break\n{}".format,
                _names,
                expression,
                block,
                expression,
                block,
            ),
            st.builds("for {} in range({} % 3):\n{}\nelse:\n{}".format, _names, expression, block, block),
            st.builds("try:\n{}\nexcept ValueError as {}:\n{}".format, block, _names, block),
            st.builds("try:\n{}\nexcept Exception:\n{}\nelse:\n{}\nfinally:\n{}".format, block, block, block, block),
            st.builds("with suppress(Exception):\n{}".format, block),
            st.builds("with closing(Closes()) as {}:\n{}".format, _names, block),
            st.builds("def {}({}=0):\n{}\n    return {}".format, _names, _names, block, expression),
            st.builds("def {}():\n    global {}\n{}".format, _names, _names, block),
            st.builds("class {}:\n{}".format, _names, block),
            st.builds(
                "match {}:\n    case 1:\n{}\n    case {}:\n{}".format,
                expression,
                block.map(_indent),
                _names,
                block.map(_indent),
            ),
        )

    return st.recursive(simple, compound, max_leaves=6)


_programs = st.lists(_statements(), min_size=1, max_size=6).map("\n".join)


class Closes:
    def close(self) -> None:
        """A manager that lets exceptions through."""


def _outcome(program: str, namespace: dict[str, Any]) -> tuple[str, str]:
    """How a program ends, and which numbers it leaves behind."""
    steps = 0

    def bound(*_: object) -> Any:
        nonlocal steps
        steps += 1
        if steps > 2000:
            raise TimeoutError
        return bound

    try:
        tree = compile(program, "<program>", "exec")
        before = sys.gettrace()
        sys.settrace(bound)
        try:
            exec(tree, namespace)
        finally:
            sys.settrace(before)
    except Exception as error:  # noqa: BLE001 - programs do as they like; the two must do the same
        return type(error).__name__, ""
    return "", str({name: value for name, value in namespace.items() if isinstance(value, int) and name in "abcdef"})


_FULL = {
    **dict(zip("abcdef", range(6), strict=True)),
    "suppress": contextlib.suppress,
    "closing": contextlib.closing,
    "Closes": Closes,
}


@settings(max_examples=150, deadline=None)
@given(_programs)
@example("with suppress(Exception):\n    raise ValueError\n    a = 1\na")
@example("for a in range(0): b = 1\nb = b")
@example("def a():\n    global b\n    del b\nb = 1\na()")
def test_a_program_runs_the_same_with_only_what_was_found(program):
    try:
        compile(program, "<program>", "exec")
    except SyntaxError:
        return
    found = cell_names(program, lambda text: text)
    full, some = copy.copy(_FULL), {name: _FULL[name] for name in found.reads if name in _FULL}
    outcome, outcome_with_some = _outcome(program, full), _outcome(program, some)
    if outcome[0]:
        assert outcome_with_some[0] == outcome[0]
    else:
        assert outcome_with_some[0] == ""
        assigned = {name: value for name, value in full.items() if name in some}
        assert {name: repr(value) for name, value in some.items() if isinstance(value, int)} == {
            name: repr(value) for name, value in assigned.items() if isinstance(value, int)
        }


@settings(max_examples=50, deadline=None)
@given(_programs)
def test_only_names_of_the_text_are_found(program):
    try:
        compile(program, "<program>", "exec")
    except SyntaxError:
        return
    found = cell_names(program, lambda text: text)
    identifiers = {node.id for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)}
    assert set(found.reads) <= identifiers
