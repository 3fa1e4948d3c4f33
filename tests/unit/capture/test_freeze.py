"""What a notebook holds arrives on a rank as it was, and comes home without harm."""

from __future__ import annotations

import gc
import linecache
import logging
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest

from air_nb.errors import CaptureError
from air_nb.protocol.bundle import Bundle
from air_nb.protocol.pickling import Freezer, ShippedRegistry, freeze_values, thaw

_ARRIVES = {
    "lambda": ("double = lambda x: 2 * x", "double", "double(4)", 8),
    "nested function": (
        "def outer(n):\n    def inner(x):\n        return x + n\n    return inner\nadd = outer(3)",
        "add",
        "add(4)",
        7,
    ),
    "class with inheritance": (
        "class A:\n    def who(self): return 'A'\nclass B(A):\n    def who(self): return super().who() + 'B'\n",
        "B",
        "B().who()",
        "AB",
    ),
    "dataclass": (
        """
from dataclasses import dataclass, field
@dataclass(frozen=True, slots=True)
class C:
    x: int
    y: list = field(default_factory=list)
c = C(1)
""",
        "c",
        "(c.x, c.y, type(c)(5).x)",
        (1, [], 5),
    ),
    "generator function": ("def count(n):\n    yield from range(n)", "count", "list(count(3))", [0, 1, 2]),
    "coroutine function": (
        "import asyncio\nasync def f(): return 3",
        "f",
        "__import__('asyncio').run(f())",
        3,
    ),
    "array": ("import numpy\na = numpy.arange(5)", "a", "(a.tolist(), a.flags.writeable)", ([0, 1, 2, 3, 4], True)),
    "read-only array": (
        "import numpy\na = numpy.arange(5)\na.flags.writeable = False",
        "a",
        "a.flags.writeable",
        False,
    ),
    "module alias": ("import os.path as p", "p", "p.basename('/a/b')", "b"),
    "module of a function": ("import math\ndef f(): return math.sqrt(4)", "f", "f()", 2.0),
    "name that shadows a builtin": ("sum = lambda xs: 'mine'", "sum", "sum([1])", "mine"),
    "function that calls itself": ("def f(n): return 1 if n == 0 else n * f(n - 1)", "f", "f(4)", 24),
    "enum": ("import enum\nclass E(enum.Enum):\n    A = 1\nx = E.A", "x", "(x.name, x is type(x)['A'])", ("A", True)),
    "named tuple": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\np = P(1, 2)", "p", "p.y", 2),
    "abstract class": (
        """
import abc
class A(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
class B(A):
    def f(self): return 1
b = B()
""",
        "b",
        "b.f()",
        1,
    ),
    "property and class method": (
        """
class A:
    @property
    def p(self): return 1
    @classmethod
    def c(cls): return cls.__name__
a = A()
""",
        "a",
        "(a.p, a.c())",
        (1, "A"),
    ),
    "class with slots": ("class S:\n    __slots__ = ('x',)\ns = S()\ns.x = 4", "s", "s.x", 4),
    "bound method": ("class A:\n    n = 3\n    def m(self): return self.n\nm = A().m", "m", "m()", 3),
    "partial": ("import functools\nf = functools.partial(lambda a, b: a - b, b=1)", "f", "f(3)", 2),
    "exception class": (
        "class Bad(ValueError): pass\ne = Bad('x')",
        "e",
        "(type(e).__name__, e.args)",
        ("Bad", ("x",)),
    ),
    "cached function that calls itself": (
        "import functools\n@functools.cache\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)",
        "fib",
        "(fib(30), fib.cache_info().maxsize)",
        (832040, None),
    ),
    "cached method and property": (
        """
import functools
class A:
    @functools.lru_cache
    def m(self): return 1
    @functools.cached_property
    def p(self): return 2
a = A()
""",
        "a",
        "(a.m(), a.p, type(a).m.cache_info().maxsize)",
        (1, 2, 128),
    ),
    "single dispatch": (
        """
import functools
@functools.singledispatch
def f(x): return 'any'
@f.register
def _(x: int): return 'int'
""",
        "f",
        "f(1) + f('')",
        "intany",
    ),
    "new types": (
        """
import typing
Id = typing.NewType('Id', int)
P = typing.ParamSpec('P')
T = typing.TypeVar('T')
def f(x: Id, g: typing.Callable[P, T]) -> T: return Id(x)
""",
        "f",
        "f(3, None)",
        3,
    ),
    "function of a library, by name": (
        "import functools\nf = functools.wraps",
        "f",
        "f is __import__('functools').wraps",
        True,
    ),
    "cached function of a library, by name": (
        "import fnmatch\nf = fnmatch._compile_pattern",
        "f",
        "f is __import__('fnmatch')._compile_pattern",
        True,
    ),
    "the environment": ("import os\nenv = os.environ", "env", "env is __import__('os').environ", True),
    "logger": ("import logging\nlog = logging.getLogger('mine')", "log", "log.name", "mine"),
    "standard output": ("import sys\nout = sys.stdout", "out", "out is __import__('sys').stdout", True),
    "memory file": ("import io\nf = io.StringIO('text')", "f", "f.read()", "text"),
    "the main module": (
        "import __main__ as me",
        "me",
        "me is __import__('sys').modules['__main__']",
        True,
    ),
}


@pytest.mark.parametrize("cell, name, expression, expected", _ARRIVES.values(), ids=_ARRIVES.keys())
def test_arrives_on_the_rank(notebook, cell, name, expression, expected):
    notebook.run(cell)
    result = notebook.on_rank(notebook.capture(name), f"result = {expression}", "result")
    assert result == {"result": expected}


class TestIdentity:
    def test_two_names_of_one_object_stay_one(self, notebook):
        notebook.run("a = [1]\nb = a\nc = {'a': a}\na.append(c)")
        result = notebook.on_rank(notebook.capture("a", "b", "c"), "r = (a is b, c['a'] is a, a[1] is c)", "r")
        assert result["r"] == (True, True, True)

    def test_two_names_of_one_array_stay_one(self, notebook):
        notebook.run("import numpy\na = numpy.zeros(4)\nb = a")
        captured = notebook.capture("a", "b")
        assert notebook.on_rank(captured, "a[0] = 7\nr = float(b[0])", "r")["r"] == 7.0
        assert captured.sizes["b"] < 100

    def test_a_function_reads_what_the_cell_assigns(self, notebook):
        notebook.run("lr = 1\ndef train(): return lr")
        assert notebook.on_rank(notebook.capture("train"), "a = train()\nlr = 5\nb = train()", "a", "b") == {
            "a": 1,
            "b": 5,
        }

    def test_functions_called_by_functions_and_methods_read_it_too(self, notebook):
        notebook.run(
            "lr = 1\ndef helper(): return lr\ndef train(): return helper()\nclass A:\n    def m(self): return helper()"
        )
        captured = notebook.capture("train", "A")
        assert notebook.on_rank(captured, "lr = 5\nr = (train(), A().m())", "r")["r"] == (5, 5)

    def test_a_function_writes_the_globals_of_the_cell(self, notebook):
        notebook.run("n = 0\ndef count():\n    global n\n    n += 1")
        assert notebook.on_rank(notebook.capture("count"), "count()\ncount()", "n")["n"] == 2

    def test_a_class_and_its_instances_stay_together(self, notebook):
        notebook.run("class A: pass\na = A()\nb = A()")
        captured = notebook.capture("a", "A", "b")
        assert notebook.on_rank(captured, "r = type(a) is A is type(b)", "r")["r"] is True

    def test_builtins_of_the_rank_stay_a_module(self):
        namespace: dict[str, Any] = {"__builtins__": __builtins__}
        exec("def f(): return 1", namespace)
        freezer = Freezer(main_globals=namespace)
        freezer.add("f", namespace["f"])
        rank: dict[str, Any] = {"__builtins__": "as it was"}
        rank.update(thaw(freezer.bundle(), main_globals=rank))
        assert rank["__builtins__"] == "as it was"
        assert rank["f"]() == 1


class TestComingHome:
    def test_an_instance_leaves_its_class_untouched(self, notebook):
        notebook.run("class A:\n    count = 0\n    def m(self): return 'kernel'\na = A()")
        captured = notebook.capture("A", "a")
        result = notebook.on_rank(captured, "A.count = 9\nA.m = lambda self: 'rank'\na.x = 1\nb = A()", "a", "b")
        cls = notebook.namespace["A"]
        assert type(result["a"]) is type(result["b"]) is cls
        assert (cls.count, result["a"].m(), result["a"].x) == (0, "kernel", 1)

    def test_a_function_comes_home_as_itself_and_leaves_globals_untouched(self, notebook):
        notebook.run("lr = 1\ndef train(): return lr")
        result = notebook.on_rank(notebook.capture("train"), "lr = 100", "train")
        assert result["train"] is notebook.namespace["train"]
        assert notebook.namespace["lr"] == 1

    def test_a_bound_method_comes_home_to_the_class(self, notebook):
        notebook.run("class A:\n    def m(self): return self.x\na = A()\na.x = 2")
        result = notebook.on_rank(notebook.capture("a"), "a.x = 3\nm = a.m", "m")
        assert result["m"]() == 3
        assert result["m"].__func__ is notebook.namespace["A"].m

    def test_an_enum_member_is_the_member_here(self, notebook):
        notebook.run("import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2")
        assert notebook.on_rank(notebook.capture("E"), "r = [E.B]", "r")["r"][0] is notebook.namespace["E"].B

    def test_an_exception_of_a_notebook_class_can_be_caught_by_it(self, notebook):
        notebook.run("class Bad(Exception): pass")
        result = notebook.on_rank(notebook.capture("Bad"), "e = Bad(3)", "e")
        assert isinstance(result["e"], notebook.namespace["Bad"])

    def test_a_function_made_on_the_rank_has_globals_of_its_own(self, notebook):
        notebook.run("lr = 1")
        result = notebook.on_rank(notebook.capture("lr"), "lr = 7\ndef f(): return lr", "f")
        assert result["f"]() == 7
        assert notebook.namespace["lr"] == 1

    def test_a_class_made_on_the_rank_derives_from_the_one_here(self, notebook):
        notebook.run("class A: pass")
        result = notebook.on_rank(notebook.capture("A"), "class B(A): pass\nb = B()", "b")
        assert isinstance(result["b"], notebook.namespace["A"])

    def test_keys_of_two_captures_never_meet(self, notebook):
        notebook.run("def f(): pass")
        assert not notebook.capture("f").shipped.keys() & notebook.capture("f").shipped.keys()

    def test_the_rank_can_load_its_own_result(self):
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec("class A: pass", namespace)
        freezer = Freezer(main_globals=namespace)
        freezer.add("A", namespace["A"])
        registry = ShippedRegistry()
        cls = thaw(freezer.bundle(), main_globals={}, registry=registry)["A"]
        again = thaw(freeze_values({"a": cls()}, registry=registry), shipped=registry.table())
        assert type(again["a"]) is cls

    def test_a_value_that_cannot_be_pickled_is_named(self):
        with pytest.raises(CaptureError) as caught:
            freeze_values({"fine": 1, "numbers": [iter([]), (n for n in "ab")]})
        (problem,) = caught.value.problems
        assert (problem.name, problem.type_name) == ("numbers", "list")
        assert problem.reason == "it holds a generator, a running generator"


class TestSources:
    def test_code_keeps_its_file_name_and_its_text_goes_along(self, notebook):
        source = "def helper():\n    return 1\ndef train():\n    def inner(): return helper()\n    return inner"
        notebook.run(source)
        captured = notebook.capture("train")
        (filename,) = notebook.filenames
        assert captured.sources == {filename: source}
        cell = "r = (train.__code__.co_filename, train().__code__.co_filename, train.__code__.co_firstlineno)"
        assert notebook.on_rank(captured, cell, "r")["r"] == (filename, filename, 3)

    def test_a_class_without_methods_brings_the_newest_cell_that_defines_it(self, notebook):
        cell = "from dataclasses import dataclass\n@dataclass\nclass Config:\n    lr: float = {}\n"
        notebook.run(cell.format(1))
        notebook.run(cell.format(2))
        notebook.run("class ConfigElse: pass\nconfig = Config()")
        assert notebook.capture("config").sources == {notebook.filenames[1]: cell.format(2)}

    def test_files_on_disk_stay_there(self, notebook, tmp_path):
        path = tmp_path / "script.py"
        path.write_text("def f(): pass\n")
        exec(compile(path.read_text(), str(path), "exec"), notebook.namespace)
        assert linecache.getlines(str(path))
        assert notebook.capture("f").sources == {}


class TestShells:
    def test_functions_leave_names_of_the_shell_behind(self, notebook):
        class Shell:
            def __reduce__(self):
                raise AssertionError

        hidden = {"get_ipython": Shell(), "exit": Shell()}
        notebook.namespace.update(hidden, exit="mine")
        notebook.run("def f(): return get_ipython(), exit")
        captured = notebook.capture("f", hidden=hidden)
        result = notebook.on_rank(captured, "get_ipython = lambda: 'of the rank'\nr = f()", "r")
        assert result["r"] == ("of the rank", "mine")


class TestLimits:
    def test_large_arrays_are_counted_and_not_copied(self, notebook):
        notebook.run("import numpy\nsmall = numpy.zeros(10)\nbig = numpy.zeros(2**27)\nhuge = numpy.zeros(2**28)")
        process = psutil.Process()
        before = process.memory_info().rss
        with pytest.raises(CaptureError) as caught:
            notebook.capture("small", "big", "huge")
        assert process.memory_info().rss - before < 50 << 20
        assert [problem.name for problem in caught.value.problems] == ["huge", "big"]
        assert str(caught.value.problems[0]) == (
            "`huge` (ndarray) can't be sent to the ranks: it is 2.0 GiB large, and all names together may "
            "have 256 MiB. Load the data inside the cell."
        )

    def test_many_names_that_are_too_large_only_together(self, notebook):
        notebook.run("a = bytes(600)\nb = bytes(500)\nc = bytes(100)")
        with pytest.raises(CaptureError) as caught:
            notebook.capture("c", "b", "a", limit_bytes=1000)
        assert [problem.name for problem in caught.value.problems] == ["a"]

    def test_a_long_list_is_given_up_early(self, notebook):
        notebook.namespace["numbers"] = list(range(10**6))
        freezer = Freezer(limit_bytes=10_000)
        with pytest.raises(Exception, match="more than the limit"):
            freezer.add("numbers", notebook.namespace["numbers"])
        assert freezer.nbytes < 200_000

    def test_what_names_share_counts_once(self, notebook):
        notebook.run("import numpy\na = numpy.zeros(100)\nb = a\nc = (n for n in a)")
        notebook.capture("a", "b", limit_bytes=1500)
        with pytest.raises(CaptureError) as caught:
            notebook.capture("c", "a", "b", limit_bytes=1500)
        assert [problem.name for problem in caught.value.problems] == ["c"]

    def test_sizes_are_by_name(self, notebook):
        notebook.run("import numpy\na = numpy.zeros(1000)\nb = 1")
        captured = notebook.capture("b", "a")
        assert captured.names == ("b", "a")
        assert captured.sizes["b"] < 50
        assert 8000 <= captured.sizes["a"] < 8300
        assert sum(captured.sizes.values()) == captured.bundle.nbytes


class TestLifetime:
    """Large arrays are gone with the last reference, not when the cycle collector happens to run."""

    @pytest.fixture(autouse=True)
    def without_collector(self):
        gc.disable()
        yield
        gc.enable()

    def test_nothing_holds_on_to_what_was_captured(self, notebook):
        notebook.run("import numpy\na = numpy.zeros(10)\nclass A: pass\nb = [A(), a]")
        captured = notebook.capture("a", "A", "b")
        watched = weakref.ref(notebook.namespace["a"])
        del captured
        notebook.namespace.clear()
        assert watched() is None

    def test_nothing_holds_on_to_what_was_thawed(self, tmp_path):
        numpy = pytest.importorskip("numpy")
        freeze_values({"a": numpy.zeros(1 << 20)}).write(tmp_path / "x")
        values = thaw(Bundle.open(tmp_path / "x"), main_globals={})
        watched = weakref.ref(values["a"])
        assert str(tmp_path / "x") in Path("/proc/self/maps").read_text()
        del values
        assert watched() is None
        assert str(tmp_path / "x") not in Path("/proc/self/maps").read_text()


class TestReferences:
    def test_a_module_made_in_this_process_is_refused(self, notebook, monkeypatch):
        made = types.ModuleType("made_here")
        exec("def f(): return 1", made.__dict__)
        monkeypatch.setitem(sys.modules, "made_here", made)
        notebook.namespace.update(made=made, f=made.f)
        with pytest.raises(CaptureError) as caught:
            notebook.capture("made", "f")
        assert [problem.name for problem in caught.value.problems] == ["made", "f"]
        assert "`made_here`" in caught.value.problems[1].reason

    def test_a_logger_is_not_pickled_with_its_handlers(self, notebook, tmp_path):
        handler = logging.FileHandler(tmp_path / "log")
        logger = logging.getLogger("with a handler")
        logger.addHandler(handler)
        notebook.namespace["log"] = logger
        try:
            assert notebook.capture("log").sizes["log"] < 100
        finally:
            handler.close()
            logger.removeHandler(handler)

    def test_thawing_can_be_kept_from_importing(self):
        bundle = freeze_values({"x": __import__("fractions").Fraction(1, 2)})
        modules = {name: sys.modules.pop(name) for name in ["fractions"]}
        try:
            with pytest.raises(Exception, match="fractions is not imported here") as caught:
                thaw(bundle, may_import=False)
            assert "`x`" in caught.value.__notes__[0]
        finally:
            sys.modules.update(modules)
