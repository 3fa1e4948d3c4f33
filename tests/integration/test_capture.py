"""What a cell takes from the notebook to its ranks, and what it refuses to take, in a real kernel."""

from __future__ import annotations

import pytest

_DEFINITIONS = """
import dataclasses
import numpy as np
import os.path as osp
double = lambda x: 2 * x
def outer(n):
    def inner(x):
        return n + x
    return inner
add_three = outer(3)
class Base:
    def hello(self):
        return "base"
class Child(Base):
    def hello(self):
        return super().hello() + "+child"
@dataclasses.dataclass
class Point:
    x: int
    y: int = 2
def countdown(n):
    while n:
        yield n
        n -= 1
array = np.arange(6).reshape(2, 3)
input = "mine"
late = "from the notebook"
items, factor, width = [1, 2, 3], 10, 7
"""

_EXPRESSIONS = {
    "lambda": ("double(21)", 42),
    "nested function": ("add_three(4)", 7),
    "class with inheritance": ("Child().hello(), isinstance(Child(), Base)", ("base+child", True)),
    "dataclass": ("repr(Point(1)), Point(1) == Point(1, 2)", ("Point(x=1, y=2)", True)),
    "generator function": ("list(countdown(3))", [3, 2, 1]),
    "numpy array": ("array.sum().item(), array.shape", (15, (2, 3))),
    "module alias": ("osp.join('a', 'b')", "a/b"),
    "name shadowing a builtin": ("input", "mine"),
    "builtin that nobody shadowed": ("max(1, 2)", 2),
    "name assigned before it is read": ("late = 'from the cell'\nlate", "from the cell"),
    "name only read inside a comprehension": ("[factor * i for i in items]", [10, 20, 30]),
    "name only read inside an f-string": ("f'{1:{width}d}|{items[0]}'", "      1|1"),
    "name only read inside a lambda": ("(lambda: factor + 1)()", 11),
    "name only read inside a nested function": ("def f():\n    return lambda: factor + 2\nf()()", 12),
    "name only read by a shell command": ("out = !echo {factor} $width\nlist(out)", ["10 7"]),
    "name only read under %time": ("%time value = factor * 2\nvalue", 20),
}


@pytest.fixture(scope="module")
def definitions(kernel):
    kernel.ok(_DEFINITIONS)
    yield
    kernel.ok("del input")


@pytest.mark.parametrize("code,expected", _EXPRESSIONS.values(), ids=_EXPRESSIONS)
def test_captured(definitions, on_ranks, code, expected):
    assert on_ranks(code) == [expected]


def test_a_name_assigned_first_in_the_cell_is_not_sent(kernel):
    kernel.ok("import threading\nlock = threading.Lock()")

    kernel.ok("%%distributed --nproc 1\nlock = 1\nassert lock == 1")


def test_a_helper_module_edited_between_two_cells_is_imported_as_it_is_on_disk(kernel, on_ranks):
    helper = kernel.cwd / "edited_helper.py"
    helper.write_text("def answer():\n    return 'first'\n")
    kernel.ok("import edited_helper\nfrom edited_helper import answer")
    cell = "edited_helper.answer(), answer()"
    assert on_ranks(cell) == [("first", "first")]

    helper.write_text("def answer():\n    return 'second, edited'\n")

    assert on_ranks(cell) == [("second, edited", "second, edited")]


def test_only_the_names_given_by_in_are_sent(kernel):
    kernel.ok("sent, unsent = 1, 2")

    cell = kernel.run("%%distributed --nproc 1 --in sent\nprint('sent', eval('sent'))\nunsent")

    assert "sent 1" in cell.text
    assert "NameError: name 'unsent' is not defined" in cell.traceback


def test_credentials_are_captured_but_masked_in_the_record(kernel, on_ranks, test_environment):
    kernel.ok("hf_token = 'hf_" + "a" * 34 + "'")

    assert on_ranks("literal_token = 'hf_" + "b" * 34 + "'\nhf_token[-4:]") == ["aaaa"]

    newest = max((test_environment / "runs").iterdir(), key=lambda path: path.name)
    assert "bbbb" not in (newest / "cell.py").read_text()


@pytest.mark.usefixtures("nothing_started")
def test_all_that_can_not_be_captured_is_named_in_one_error(kernel):
    kernel.ok("""
import os, socket, threading, numpy
handle = open(os.devnull)
guard = threading.Lock()
connection = socket.socket()
running = (i for i in range(3))
huge = numpy.zeros(2**30, dtype=numpy.uint8)
small = 1
""")

    cell = kernel.run("%%distributed --nproc 2\nprint(handle, guard, connection, running, huge, small)")
    kernel.ok("connection.close(); handle.close(); del huge")

    assert cell.reply_status == "error"
    assert cell.error["ename"] == "CaptureError"
    assert (
        "`handle` (TextIOWrapper) can't be sent to the ranks: it is an open file. Open it inside the cell." in cell.text
    )
    assert "`guard` (lock) can't be sent to the ranks" in cell.text
    assert "`connection` (socket) can't be sent to the ranks" in cell.text
    assert "`running` (generator) can't be sent to the ranks" in cell.text
    assert "`huge` (ndarray) can't be sent to the ranks: it is 1.0 GiB large" in cell.text.replace("over ", "")
    assert "`small`" not in cell.text
    assert "air_nb/" not in cell.text
    assert cell.text.count("CaptureError") == 1


@pytest.mark.usefixtures("nothing_started")
def test_the_error_says_where_in_a_value_the_part_is_that_can_not_travel(kernel):
    kernel.ok("import os\ncfg = {'log': open(os.devnull)}\ndef train():\n    return cfg")

    cell = kernel.run("%%distributed --nproc 2\ntrain()")
    kernel.ok("cfg['log'].close()")

    assert "`train` (function)" in cell.text
    assert 'cfg["log"]' in cell.text


def test_a_kernel_with_torch_threads_open_files_and_widgets_launches_all_the_same(kernel, on_ranks):
    kernel.ok("""
import os, threading, torch, ipywidgets
torch.set_num_threads(2)
weights = torch.randn(400, 400, requires_grad=True)
(weights @ weights).sum().backward()
stop = threading.Event()
threads = [threading.Thread(target=stop.wait, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
opened = [open(os.devnull) for _ in range(20)]
slider = ipywidgets.IntSlider()
display(slider)
""")

    values = on_ranks(
        "import torch, torch.distributed as dist\nfrom air_nb import runtime\nruntime.init_process_group()\n"
        "total = torch.ones(400, 400) @ torch.ones(400, 400)\ndist.all_reduce(total)\ntotal[0, 0].item()",
        "--nproc 2",
    )

    kernel.ok("stop.set()\nfor handle in opened:\n    handle.close()\nslider.close()\ndel opened, threads, slider")
    assert values == [800.0, 800.0]
