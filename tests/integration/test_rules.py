"""The rules that users lean on: what carries over to the ranks, what works around the cell, what is refused at once."""

from __future__ import annotations

import ast
import subprocess
import sys

import nbformat
import pytest


def test_tqdm_auto_draws_console_bars_on_ranks(kernel):
    cell = kernel.ok(
        "%%distributed --nproc 2\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(3), desc='epoch'):\n    pass\n"
        "print(tqdm.__module__)"
    )

    assert "epoch: 100%|" in cell.text
    assert "notebook" not in cell.text
    assert not any("application/vnd.jupyter.widget-view+json" in display["data"] for display in cell.displays())


_LOGGING = """%%distributed --nproc 2 --quiet
import logging, warnings
logging.getLogger('their.library').info('an info')
logging.warning('a warning')
warnings.warn('a python warning')
"""


def test_logging_and_warnings_are_shown_by_the_kernels_levels_and_filters(kernel):
    text = kernel.ok(_LOGGING).text
    assert "an info" not in text
    assert "a warning" in text
    assert "UserWarning: a python warning" in text

    kernel.ok("import logging\nlogging.getLogger().setLevel(logging.ERROR)")
    assert "a warning" not in kernel.ok(_LOGGING).text

    kernel.ok(
        "import logging, warnings\nlogging.basicConfig(level=logging.INFO, format='%(name)s says %(message)s')\n"
        "saved = warnings.filters[:]\nwarnings.filterwarnings('ignore', message='a python')"
    )
    text = kernel.ok(_LOGGING).text
    kernel.ok("warnings.filters[:] = saved\nlogging.getLogger().setLevel(logging.WARNING)")

    assert text.splitlines() == ["[0-1] their.library says an info", "[0-1] root says a warning"]


def test_a_warning_filter_that_raises_is_replicated(kernel):
    kernel.ok("import warnings\nsaved = warnings.filters[:]\nwarnings.simplefilter('error')")

    cell = kernel.run("%%distributed --nproc 1\nimport warnings\nwarnings.warn('now an error')")
    kernel.ok("warnings.filters[:] = saved")

    assert "UserWarning: now an error" in cell.traceback


def test_handlers_are_not_replicated(kernel):
    kernel.ok(
        f"import logging\nhandler = logging.FileHandler({str(kernel.cwd / 'kernel.log')!r})\n"
        "logging.getLogger().addHandler(handler)"
    )

    kernel.ok("%%distributed --nproc 1\nimport logging\nlogging.error('on a rank')")
    kernel.ok("logging.getLogger().removeHandler(handler)\nhandler.close()")

    assert (kernel.cwd / "kernel.log").read_text() == ""


def test_autoreload_and_an_edited_helper_module(kernel, on_ranks):
    helper = kernel.cwd / "reloaded_helper.py"
    helper.write_text("class Model:\n    version = 1\n    def tell(self):\n        return self.version\n")
    kernel.ok("%load_ext autoreload\n%autoreload 2\nfrom reloaded_helper import Model\nmodel = Model()")
    assert on_ranks("model.tell(), Model().tell()") == [(1, 1)]

    helper.write_text("class Model:\n    version = 22222\n    def tell(self):\n        return self.version\n")

    assert on_ranks("model.tell(), Model().tell()") == [(22222, 22222)]
    assert kernel.value("model.tell()") == "22222"
    kernel.ok("%autoreload 0")


def test_chdir_env_and_module_path_carry_over(kernel, on_ranks):
    (kernel.cwd / "below").mkdir(exist_ok=True)
    (kernel.cwd / "below" / "found_below.py").write_text("here = 'below'\n")
    kernel.ok(
        "import os, sys\nbefore = os.getcwd()\nos.chdir('below')\n%env AIR_TEST_SET=from the notebook\n"
        "sys.path.append('/nowhere')"
    )

    values = on_ranks(
        "import os, sys, found_below\nos.getcwd(), os.environ['AIR_TEST_SET'], '/nowhere' in sys.path, found_below.here"
    )
    kernel.ok("os.chdir(before)\ndel os.environ['AIR_TEST_SET']\nsys.path.remove('/nowhere')")

    assert values == [(str(kernel.cwd / "below"), "from the notebook", True, "below")]
    assert on_ranks("import os\n'AIR_TEST_SET' in os.environ, os.getcwd()") == [(False, str(kernel.cwd))]


def test_matplotlib_inline_shows_figures_of_the_ranks(kernel):
    kernel.ok("%matplotlib inline")

    cell = kernel.ok(
        "%%distributed --nproc 1\nimport matplotlib, matplotlib.pyplot as plt\nprint(matplotlib.get_backend())\n"
        "plt.plot([1, 2])\nplt.show()"
    )

    assert "inline" in cell.stream("stdout")
    assert any("image/png" in display["data"] for display in cell.displays())


def test_a_figure_left_open_at_the_end_of_the_cell_is_shown(kernel):
    kernel.ok("%matplotlib inline\nimport matplotlib.pyplot as plt")

    cell = kernel.ok("%%distributed --nproc 1\nplt.plot([1, 2]);")

    assert any("image/png" in display["data"] for display in cell.displays())


def test_a_back_end_without_windows_is_kept(kernel):
    kernel.ok("import matplotlib\nmatplotlib.use('agg')")

    cell = kernel.ok("%%distributed --nproc 1 --quiet\nimport matplotlib\nprint(matplotlib.get_backend().lower())")
    kernel.ok("%matplotlib inline")

    assert cell.text == "agg\n"


def test_capture_above_takes_the_output(kernel):
    cell = kernel.ok("%%capture taken\n%%distributed --nproc 2 --quiet\nprint('caught')")

    assert cell.text == ""
    assert kernel.value("taken.stdout") == repr("[0-1] caught\n")


def test_time_above_times_the_run_and_lines_keep_their_numbers(kernel):
    cell = kernel.ok("%%time\n%%distributed --nproc 2 --quiet\nprint('timed')")
    assert "[0-1] timed\n" in cell.text
    assert "Wall time:" in cell.text

    failed = kernel.run("%%time\n%%distributed --nproc 2\nx = 1\n1 / 0")
    assert "----> 4 1 / 0" in failed.traceback
    assert failed.reply_status == "error"


def test_the_lines_above_are_shown_whole_although_the_cells_text_occurs_in_them(kernel):
    cell = kernel.run("%%time\n%%distributed --nproc 1 --name ime\nime")

    assert "      2 %%distributed --nproc 1 --name ime\n----> 3 ime" in cell.traceback


def test_time_below_times_on_the_ranks(kernel):
    cell = kernel.ok("%%distributed --nproc 2\n%%time\nprint('timed')")

    assert cell.text.count("Wall time:") >= 1
    assert "timed" in cell.text


_KEYBOARD = {
    "input": "input('name? ')",
    "breakpoint": "breakpoint()",
    "pdb": "import pdb\npdb.set_trace()",
    "%debug": "%debug",
    "%debug of a statement": "%debug print(1)",
    "getpass": "import getpass\ngetpass.getpass()",
}


@pytest.mark.parametrize("code", _KEYBOARD.values(), ids=_KEYBOARD)
def test_what_needs_a_keyboard_fails_at_once_and_says_where_it_works(kernel, code):
    cell = kernel.run(f"%%distributed --nproc 2\n{code}")

    assert cell.reply_status == "error"
    assert "ranks have no keyboard: train.func() runs it here" in cell.traceback
    assert "air_nb/" not in cell.traceback
    assert "pdb.py" not in cell.traceback


def test_stdin_of_a_rank_is_empty(on_ranks):
    assert on_ranks("import sys, os\nsys.stdin.read(), os.path.realpath('/proc/self/fd/0')") == [("", "/dev/null")]


_NESTED = {
    "magic": "%%distributed\nprint(1)",
    "magic after loading": "%load_ext air_nb\nget_ipython().run_cell_magic('distributed', '', 'print(1)')",
    "decorator": "from air_nb import distributed\n@distributed\ndef f():\n    return 1\nf.distributed()",
}


@pytest.mark.parametrize("code", _NESTED.values(), ids=_NESTED)
def test_a_run_inside_a_run_is_refused(kernel, code):
    cell = kernel.run(f"%%distributed --nproc 2\n{code}")

    assert cell.reply_status == "error"
    assert "this is a rank already" in cell.traceback
    assert "air_nb/" not in cell.traceback


@pytest.mark.usefixtures("nothing_started")
@pytest.mark.parametrize("above", ["%matplotlib inline", "x = 1", "# a comment"])
def test_distributed_below_another_line_is_a_usage_error(kernel, above):
    cell = kernel.run(f"{above}\n%%distributed --nproc 2\nprint('ran')")

    assert cell.reply_status == "error"
    assert cell.text.startswith("UsageError: %%distributed must be the first line of its cell")


def test_a_package_installed_in_editable_mode_is_found_and_read_afresh(kernel, on_ranks):
    source, site = kernel.cwd / "checkout", kernel.cwd / "site"
    package = source / "edited_package"
    package.mkdir(parents=True)
    site.mkdir()
    (package / "__init__.py").write_text("value = 1\n")
    (site / "edited_package.pth").write_text(f"{source}\n")
    kernel.ok(f"import site\nsite.addsitedir({str(site)!r})\nimport edited_package")
    assert on_ranks("edited_package.value") == [1]

    (package / "__init__.py").write_text("value = 'edited'\n")

    assert on_ranks("edited_package.value") == ["edited"]


def test_several_runs_at_a_time_from_threads_of_one_kernel(kernel):
    kernel.ok("""
from concurrent.futures import ThreadPoolExecutor
from air_nb import distributed
import os, time
meeting = "meeting_%d" % time.monotonic_ns()
os.mkdir(meeting)
@distributed(nproc=2, device="cpu", output="none")
def meet(me, others):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    open(os.path.join(meeting, str(me)), "w").close()
    while len(os.listdir(meeting)) < others:  # only ends if all of them run at the same time
        time.sleep(0.01)
    dist.barrier()
    return me, dist.get_rank()
with ThreadPoolExecutor(3) as pool:
    met = list(pool.map(lambda me: meet.distributed(me, 3), range(3)))
""")

    assert kernel.value("met") == str([[(me, rank) for rank in range(2)] for me in range(3)])


def test_widgets_on_ranks_become_their_text_with_one_note(kernel):
    cell = kernel.ok(
        "%%distributed --nproc 2\nimport ipywidgets\ndisplay(ipywidgets.IntSlider(value=3))\n"
        "display(ipywidgets.IntSlider(value=4))"
    )

    assert "IntSlider(value=3)" in cell.text
    assert cell.text.count("note: a widget made on a rank is shown as its text") == 1


_SNAPSHOT = """
import os, signal, sys, threading, warnings, logging
def snapshot():
    return {
        "environ": dict(os.environ), "cwd": os.getcwd(), "sys.path": list(sys.path), "argv": list(sys.argv),
        "signals": {int(n): repr(signal.getsignal(n)) for n in signal.valid_signals()},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "umask": [os.umask(old := os.umask(0)), old][1],
        "filters": list(warnings.filters), "level": logging.getLogger().level, "excepthook": sys.excepthook,
        "stdout": id(sys.stdout), "stderr": id(sys.stderr), "main": id(sys.modules["__main__"]),
        "names": sorted(name for name in globals() if not name.startswith("_")),
        "torch": "torch" in sys.modules, "threads": sorted({t.name for t in threading.enumerate()}),
    }
os.environ["AIR_TEST_KEEP"] = "kept"
mine, before, after = [1, 2], None, None
"""

_ENDINGS = {
    "success": "%%distributed --nproc 2\nimport os, sys\nmine.append(3)\nsys.path.insert(0, 'x')\n"
    "os.environ['AIR_TEST_KEEP'] = 'changed'\n"
    "os.chdir('/')\nnew_name = 1",
    "failure": "%%distributed --nproc 2\nmine.clear()\nraise ValueError",
    "exit": "%%distributed --nproc 2\nimport os\nmine.clear()\nos._exit(3)",
    "not captured": "%%distributed --nproc 2\nprint(mine, guard)",
    "decorator": "distributed(nproc=2, device='cpu')(lambda: mine.clear()).distributed()",
}


@pytest.mark.parametrize("code", _ENDINGS.values(), ids=_ENDINGS)
def test_the_kernel_is_left_as_it_was(kernel, code):
    kernel.ok(_SNAPSHOT)
    kernel.ok("import threading\nguard = threading.Lock()\nfrom air_nb import distributed")
    kernel.ok("before = snapshot()")

    kernel.run(code)

    kernel.ok("after = snapshot()")
    changed = kernel.value("{name: (before[name], after[name]) for name in before if before[name] != after[name]}")
    assert changed == "{}"
    assert kernel.value("mine") == "[1, 2]"


@pytest.fixture(scope="module")
def papermill_run(tmp_path_factory):
    """A notebook with parameters, whose cell before the last fails, run by papermill: how it ended, and the result."""
    folder = tmp_path_factory.mktemp("papermill")
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell("lr, ranks = 0.1, 1", metadata={"tags": ["parameters"]}),
            nbformat.v4.new_code_cell("%load_ext air_nb"),
            nbformat.v4.new_code_cell(
                "%%distributed --nproc {ranks} --device cpu --quiet --out seen\nprint('lr is', lr)\nlr * 2"
            ),
            nbformat.v4.new_code_cell("print(seen)"),
            nbformat.v4.new_code_cell("%%distributed --nproc 2 --device cpu\nraise ValueError('on purpose')"),
            nbformat.v4.new_code_cell("print('went on')"),
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(notebook, folder / "in.ipynb")
    command = [sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb", "-p", "lr", "0.5", "-p", "ranks", "2"]
    ended = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=180)
    return ended, nbformat.read(folder / "out.ipynb", as_version=4)


def _text(cell) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


def test_papermill_parameters_reach_the_ranks(papermill_run):
    _, notebook = papermill_run

    texts = [_text(cell) for cell in notebook.cells]
    assert "[0-1] lr is 0.5\n" in texts
    assert "[1.0, 1.0]\n" in texts


def test_a_failed_cell_stops_papermill(papermill_run):
    ended, notebook = papermill_run

    assert ended.returncode != 0
    assert "RankFailedError" in ended.stderr
    assert "on purpose" in ended.stderr
    assert "went on\n" not in [_text(cell) for cell in notebook.cells]


def test_loader_workers_start_as_in_a_process_started_by_hand(kernel, on_ranks):
    code = "import multiprocessing, os\nmultiprocessing.get_start_method()"
    assert on_ranks(code) == [ast.literal_eval(kernel.value("__import__('multiprocessing').get_start_method()"))]
