"""What can't travel is refused with its name, the reason and what to do; all of it at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from air_nb.errors import CaptureError

_REFUSED = {
    "open file": ("x = open('/dev/null')", "TextIOWrapper", "an open file", "Open it inside the cell."),
    "open binary file": ("x = open('/dev/null', 'rb')", "BufferedReader", "an open file", "Open it"),
    "temporary file": ("import tempfile\nx = tempfile.TemporaryFile()", "BufferedRandom", "an open file", "Open it"),
    "lock": ("import threading\nx = threading.Lock()", "lock", "a lock", "Make it inside the cell."),
    "event": ("import threading\nx = threading.Event()", "Event", "a lock", "Make it"),
    "thread": ("import threading\nx = threading.Thread()", "Thread", "a thread", "Start it inside the cell."),
    "socket": ("import socket\nx = socket.socket()", "socket", "a network connection", "Connect inside the cell."),
    "running generator": ("x = (n for n in 'ab')\nnext(x)", "generator", "a running generator", "Call its function"),
    "coroutine": ("async def f(): ...\nx = f()\n", "coroutine", "waiting on this process's event loop", "await it"),
    "database": ("import sqlite3\nx = sqlite3.connect(':memory:')", "Connection", "a database connection", "Connect"),
    "lock between processes": (
        "import multiprocessing\nx = multiprocessing.get_context('spawn').Lock()",
        "Lock",
        "tied to the processes",
        "Make it",
    ),
    "process": (
        "import subprocess\nx = subprocess.Popen(['true'])\nx.wait()",
        "Popen",
        "a child of this process",
        "Start it",
    ),
    "executor": (
        "import concurrent.futures\nx = concurrent.futures.ThreadPoolExecutor()",
        "ThreadPoolExecutor",
        "a pool of threads",
        "Make it",
    ),
    "memory view": ("x = memoryview(b'abc')", "memoryview", "a view of another object's memory", "Send the object"),
    "widget": ("import ipywidgets\nx = ipywidgets.IntSlider()", "IntSlider", "a widget", "Read its value"),
    "deep list": (
        "x = []\nfor _ in range(100_000): x = [x]",
        "list",
        "nested too deeply",
        "Build it inside the cell",
    ),
    "own __reduce__ that fails": (
        "class A:\n    def __reduce__(self): raise KeyError('no way')\nx = A()",
        "A",
        "nothing that pickle can send ('no way')",
        "Make it",
    ),
}


@pytest.mark.parametrize("cell, type_name, reason, advice", _REFUSED.values(), ids=_REFUSED.keys())
def test_is_refused_with_a_reason(notebook, cell, type_name, reason, advice):
    notebook.run(cell)
    value = notebook.namespace["x"]
    try:
        with pytest.raises(CaptureError) as caught:
            notebook.capture("x")
    finally:
        if hasattr(value, "close"):
            value.close()
    (problem,) = caught.value.problems
    assert (problem.name, problem.type_name) == ("x", type_name)
    assert problem.reason.startswith(f"it is {reason}")
    assert advice in problem.advice


def test_a_shell_is_refused(notebook):
    from IPython.core.interactiveshell import InteractiveShell

    class Shell(InteractiveShell):
        def __init__(self) -> None:
            """Without any of what a shell sets up."""

    notebook.namespace["ip"] = object.__new__(Shell)
    with pytest.raises(CaptureError, match=r"Call get_ipython\(\) inside the cell"):
        notebook.capture("ip")


_PARTS = {
    "item": ("x = {'a': [1, {'log': log}]}", 'it holds `x["a"][1]["log"]` (TextIOWrapper), an open file'),
    "attribute": (
        "class A: pass\nx = A()\nx.part = A()\nx.part.log = log",
        "it holds `x.part.log` (TextIOWrapper), an open file",
    ),
    "slot": (
        "class A:\n    __slots__ = ('log',)\nx = A()\nx.log = log",
        "it holds `x.log` (TextIOWrapper), an open file",
    ),
    "global of a function": ("def x(): return log", "it uses `log` (TextIOWrapper), an open file"),
    "global of a called function": (
        "def helper(): return log\ndef x(): return helper()",
        "it uses `helper`, which uses `log` (TextIOWrapper), an open file",
    ),
    "closure variable": (
        "def make():\n    mine = log\n    return lambda: mine\nx = make()",
        "it uses `mine` (TextIOWrapper), an open file",
    ),
    "default": ("def x(a, b=log): return b", "it uses `b` (TextIOWrapper), an open file"),
    "method": (
        "class x:\n    def m(self): return log",
        "it holds `x.m`, which uses `log` (TextIOWrapper), an open file",
    ),
    "class of an instance": (
        "class A:\n    def m(self): return log\nx = A()",
        "it uses `A.m`, which uses `log` (TextIOWrapper), an open file",
    ),
    "item of a global": (
        "cfg = {'log': log}\ndef x(): return cfg",
        'it uses `cfg["log"]` (TextIOWrapper), an open file',
    ),
    "argument of a partial": (
        "import functools\nx = functools.partial(print, file=log)",
        'it holds `x.keywords["file"]` (TextIOWrapper), an open file',
    ),
    "made while pickling": (
        "class A:\n    def __getstate__(self): return {'a': (n for n in 'ab')}\nx = A()",
        "it holds a generator, a running generator",
    ),
}


@pytest.mark.parametrize("cell, reason", _PARTS.values(), ids=_PARTS.keys())
def test_the_part_that_is_to_blame_is_named(notebook, cell, reason):
    with Path("/dev/null").open() as log:
        notebook.namespace["log"] = log
        notebook.run(cell)
        with pytest.raises(CaptureError) as caught:
            notebook.capture("x")
    assert caught.value.problems[0].reason == reason


def test_all_bad_names_are_listed_at_once(notebook):
    notebook.run(
        "import numpy, socket, threading\n"
        "lock = threading.Lock()\nsock = socket.socket()\ngen = (n for n in 'ab')\nfine = 1\n"
        "big = numpy.zeros(2**27)\nlog = open('/dev/null')\ndef train(): return log\n"
    )
    try:
        with pytest.raises(CaptureError) as caught:
            notebook.capture("fine", "log", "lock", "train", "sock", "gen", "big")
    finally:
        notebook.run("sock.close()\nlog.close()")
    assert (
        str(caught.value)
        == """\
`log` (TextIOWrapper) can't be sent to the ranks: it is an open file. Open it inside the cell.
`lock` (lock) can't be sent to the ranks: it is a lock of this process. Make it inside the cell.
`train` (function) can't be sent to the ranks: it uses `log` (TextIOWrapper), an open file. Open it inside the cell.
`sock` (socket) can't be sent to the ranks: it is a network connection. Connect inside the cell.
`gen` (generator) can't be sent to the ranks: it is a running generator. \
Call its function inside the cell, or send list(...) of it.
`big` (ndarray) can't be sent to the ranks: it is 1.0 GiB large, and all names together may have 256 MiB. \
Load the data inside the cell."""
    )
