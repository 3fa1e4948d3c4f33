"""``@distributed`` in a notebook and in a plain Python script."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_TRAIN = """
import os
from air_nb import distributed
@distributed(nproc=2, device="cpu")
def train(lr, *, epochs=1):
    return int(os.environ["RANK"]), lr * epochs
"""


@pytest.fixture(scope="module")
def train(kernel):
    kernel.ok(_TRAIN)


def test_distributed_returns_a_list_whose_index_is_the_rank(kernel, train):
    cell = kernel.ok("returned = train.distributed(0.5, epochs=4)\nprint(returned)")

    assert cell.stream("stdout") == "[(0, 2.0), (1, 2.0)]\n"
    assert "2 ranks on CPU" in cell.text


def test_without_parentheses(kernel):
    kernel.ok("from air_nb import distributed\n@distributed\ndef plain():\n    'Its own words.'\n    return 'plain'")

    assert kernel.value("plain.distributed()") == "['plain', 'plain']"
    assert kernel.value("(plain.__name__, plain.__doc__)") == "('plain', 'Its own words.')"
    assert kernel.value("plain.options.timeout_s") == "10800.0"


def test_with_empty_parentheses(kernel):
    kernel.ok("from air_nb import distributed\n@distributed()\ndef empty():\n    return 1")

    assert kernel.value("empty.distributed()") == "[1, 1]"
    assert kernel.value("empty.options.timeout_s") == "10800.0"


def test_with_overrides_changes_the_options_of_a_copy(kernel, train):
    kernel.ok("other = train.with_overrides(nproc=3, name='override', timeout='1h30m', output='rank0', env={'K': 1})")

    assert kernel.value("len(other.distributed(1))") == "3"
    assert kernel.value("(other.options.timeout_s, other.options.env)") == "(5400.0, {'K': '1'})"
    assert kernel.value("train.options.nproc") == "2"
    assert "override" in kernel.ok("%air runs").text


def test_overrides_win_over_what_they_contradict(kernel):
    kernel.ok("from air_nb import distributed\n@distributed(gpus=8, gpu_type='H100')\ndef big():\n    return 1")

    assert kernel.value("big.with_overrides(nproc=3, device='cpu').distributed()") == "[1, 1, 1]"
    assert kernel.value("big.with_overrides(gpu_ids=['0', '1']).options.gpus") == "None"


def test_the_documented_names_of_accelerators_mean_gpus(kernel):
    kernel.ok(
        "from air_nb import distributed\n@distributed(num_accelerators=3, accelerator_type='H100')\n"
        "def f():\n    return 1"
    )

    assert kernel.value("(f.options.gpus, f.options.gpu_type)") == "(3, 'H100')"
    assert kernel.value("len(f.with_overrides(accelerator_type=None, gpu_type=None).distributed())") == "3"


_BAD_OPTIONS = {
    "distributed(gpus='8')": "TypeError: gpus='8': give a whole number",
    "distributed(gpus=0)": "ValueError: --gpus 0: the number must be 1 or more",
    "distributed(timeout='soon')": "ValueError: --timeout soon: give seconds",
    "distributed(gpus=1, num_accelerators=2)": "ValueError: num_accelerators=2 contradicts gpus=1",
    "distributed(output='loud')": "ValueError: --output loud: choose one of",
    "distributed(ngpus=1)": "TypeError: distributed() got an unexpected keyword argument 'ngpus'",
    "train.with_overrides(ngpus=1)": "TypeError: distributed has no option 'ngpus'",
    "train.with_overrides(out='x')": "TypeError: distributed has no option 'out'",
}


@pytest.mark.parametrize("code,message", _BAD_OPTIONS.items(), ids=_BAD_OPTIONS)
def test_bad_options_raise_when_they_are_given(kernel, train, code, message):
    assert message in kernel.run(f"from air_nb import distributed\n{code}").traceback


def test_func_calls_it_here(kernel, train):
    kernel.ok("os.environ['RANK'] = '77'")
    assert kernel.value("train.func(2, epochs=3)") == "(77, 6)"
    kernel.ok("del os.environ['RANK']")


@pytest.mark.usefixtures("nothing_started")
def test_a_plain_call_raises_and_says_which_two_to_use(kernel, train):
    traceback = kernel.run("train(1)").traceback

    assert "NotDistributedError: train is a distributed function" in traceback
    assert "train.distributed(...) runs it on the ranks, train.func(...) runs it here" in traceback


@pytest.mark.usefixtures("nothing_started")
@pytest.mark.parametrize("arguments", ["", "1, 2", "1, epoch=2", "lr=1, epochs=2, more=3"])
def test_arguments_that_do_not_fit_raise_type_error_and_start_nothing(kernel, train, arguments):
    cell = kernel.run(f"train.distributed({arguments})")

    assert cell.error["ename"] == "TypeError"
    assert "TypeError: train() " in cell.traceback
    assert "inspect.py" not in cell.traceback


@pytest.mark.usefixtures("nothing_started")
def test_an_argument_that_can_not_be_sent_is_named_and_nothing_is_started(kernel, train):
    cell = kernel.run("train.distributed(open(os.devnull), epochs=(i for i in range(2)))")

    assert cell.error["ename"] == "CaptureError"
    assert "`argument lr` (TextIOWrapper) can't be sent to the ranks: it is an open file" in cell.text
    assert "`argument epochs` (generator) can't be sent to the ranks" in cell.text


def test_one_object_given_twice_is_one_object(kernel):
    kernel.ok(
        "from air_nb import distributed\nshared = [1]\n@distributed(nproc=1, device='cpu')\n"
        "def same(a, b):\n    return a is b, a is shared"
    )

    assert kernel.value("same.distributed(shared, b=shared)") == "[(True, True)]"


def test_an_async_function_is_awaited(kernel):
    kernel.ok(
        "import asyncio\nfrom air_nb import distributed\n@distributed(nproc=1, device='cpu')\nasync def later(x):\n"
        "    await asyncio.sleep(0)\n    return x + 1"
    )

    assert kernel.value("later.distributed(1)") == "[2]"


def test_a_function_that_uses_others_of_the_notebook_and_itself(kernel):
    kernel.ok(
        "from air_nb import distributed\ndef helper(x):\n    return x + 1\nclass Model:\n    def __call__(self, x):\n"
        "        return helper(x)\n@distributed(nproc=1, device='cpu')\ndef use(n):\n"
        "    return [Model()(i) for i in range(n)] if n < 3 else use.func(n - 1)"
    )

    assert kernel.value("use.distributed(4)") == "[[1, 2]]"


def test_a_function_of_a_helper_module_runs_as_it_is_on_disk(kernel):
    helper = kernel.cwd / "decorated_helper.py"
    text = (
        "from air_nb import distributed\nFACTOR = 2\n@distributed(nproc=1, device='cpu')\n"
        "def scale(x):\n    return x * FACTOR\n"
    )
    helper.write_text(text)
    kernel.ok("import decorated_helper")
    assert kernel.value("decorated_helper.scale.distributed(3)") == "[6]"

    helper.write_text(text.replace("FACTOR = 2", "FACTOR = 1000"))

    assert kernel.value("decorated_helper.scale.distributed(3)") == "[3000]"


def test_a_distributed_function_of_the_notebook_can_be_used_in_a_cell_on_the_ranks(kernel, train):
    kernel.ok("%%distributed --nproc 2 --out values\ntrain.func(3), type(train).__name__")

    assert kernel.value("values") == "[((0, 3), 'DistributedFunction'), ((1, 3), 'DistributedFunction')]"


def test_names_of_arguments_never_meet(kernel):
    kernel.ok(
        "from air_nb import distributed\n@distributed(nproc=1, device='cpu')\ndef many(a, /, b, *rest, c=0, **more):\n"
        "    return a, b, rest, c, more"
    )

    assert kernel.value("many.distributed(1, 2, 3, 4, c=5, a=6, rest=7)") == "[(1, 2, (3, 4), 5, {'a': 6, 'rest': 7})]"
    assert "`argument rest[1]` (generator)" in kernel.run("many.distributed(1, 2, 3, (i for i in ()))").text


def test_a_failing_function_shows_its_own_lines_and_keeps_the_other_results(kernel):
    kernel.ok(
        "import os, time\nfrom air_nb import distributed\n@distributed(nproc=2, device='cpu')\ndef broken(x):\n"
        "    if os.environ['RANK'] == '1':\n        raise LookupError('broken on purpose')\n    return x"
    )

    cell = kernel.run("broken.distributed(1)")

    assert cell.error["ename"] == "RankFailedError"
    assert "----> 6         raise LookupError('broken on purpose')" in cell.traceback.replace("6     ", "6     ")
    assert "air_nb/" not in cell.traceback


def test_a_figure_drawn_by_a_function_is_shown(kernel):
    kernel.ok(
        "%matplotlib inline\nimport matplotlib.pyplot as plt\nfrom air_nb import distributed\n"
        "@distributed(nproc=1, device='cpu')\ndef draw():\n    plt.plot([1, 2])\n    plt.show()"
    )

    cell = kernel.ok("draw.distributed()")

    assert any("image/png" in display["data"] for display in cell.displays())


_SCRIPT = """
import os
import threading
from air_nb import distributed

OFFSET = 10
held = threading.Lock()  # not read by the function: it does not travel

class Box:
    def __init__(self, value):
        self.value = value

@distributed(nproc=2, device="cpu", output="none")
def train(box, scale=1):
    import sys
    return Box(box.value * scale + OFFSET + int(os.environ["RANK"])), __name__, os.path.basename(sys.argv[0])

boxes = train.distributed(Box(1), scale=5)
print([(box.value, type(box) is Box, name, script) for box, name, script in boxes])

@distributed(nproc=2, device="cpu")
def fail():
    print("from a rank")
    raise ValueError("in the script")

try:
    fail.distributed()
except Exception as error:
    print(type(error).__name__, error.failures[0].rank, type(error.__cause__).__name__)
fail.distributed()
"""


def test_a_plain_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)

    ended = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )

    expected = [(15, True, "__main__", "train.py"), (16, True, "__main__", "train.py")]
    assert str(expected) in ended.stdout.splitlines(), ended.stderr
    assert "[0-1] from a rank" in ended.stdout or "[0] from a rank" in ended.stdout
    assert "RankFailedError" in ended.stdout
    assert " ValueError" in ended.stdout
    assert ended.returncode == 1
    assert 'raise ValueError("in the script")' in ended.stderr
    assert "train.py" in ended.stderr


def test_a_plain_script_imports_nothing_heavy_for_the_decorator(tmp_path):
    code = textwrap.dedent("""
        import sys
        from air_nb import distributed
        @distributed
        def f(): pass
        print([name for name in ("torch", "IPython", "mlflow", "ipywidgets", "pynvml", "numpy") if name in sys.modules])
    """)

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout == "[]\n"
