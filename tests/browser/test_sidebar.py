"""The panel beside the notebook in a real JupyterLab, with a real kernel, ranks on the CPU and GPUs of the stub."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest

from tests.browser.lab import NotebookPage
from tests.browser.sidebar_page import SidebarPage
from tests.nvml.fixtures import nvml_library  # noqa: F401 - a fixture
from tests.nvml.stub import FakeNvml
from tests.support.wait import eventually

_LOAD = "%load_ext air_nb"
_TOGGLE = "%air sidebar"
_LOAD_AND_OPEN = "%env AIR_NB_SIDEBAR=1\n%load_ext air_nb"
# The main thread is busy until the file is there: as with time.sleep, but the test need not wait.
_BUSY = "import time, pathlib\nprint('busy')\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)"
_SUBSHELLS = "import threading\nprint(sum('subshell' in each.name for each in threading.enumerate()))"
_ENDLESS = """\
%%distributed --nproc 2 --name {name}
import itertools, time
for step in itertools.count():
    print(f'step {{step}}', flush=True)
    time.sleep(0.2)
"""
_TRAINING = """\
%%distributed --nproc 2 --name first-half
import os, torch
from air_nb.checkpoint import CheckpointManager
from air_nb.data import DataLoader
from air_nb.runtime import init_process_group

init_process_group()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 2)), batch_size=1, num_workers=0)
manager = CheckpointManager("check points", model=model, optimizer=optimizer, data=loader, every=2, keep=50)
with manager:
    for step, (x,) in manager.steps():
        model(x).sum().backward()
        optimizer.step()
        print(f"<step {step}>", flush=True)
        if step == 5 and "AIR_NB_RESUME" not in os.environ:
            raise ValueError("enough for now")
"""


@pytest.fixture(scope="module")
def machine(nvml_library, tmp_path_factory) -> FakeNvml:  # noqa: F811
    return FakeNvml(nvml_library, tmp_path_factory.mktemp("nvml") / "state.txt")


@pytest.fixture(scope="module")
def lab_options(machine):
    return {"env": machine.environment}


@pytest.fixture(autouse=True)
def files_of_the_test_before(machine, lab):
    machine.describe()
    (lab.root / "go").unlink(missing_ok=True)


def _go(lab):
    (lab.root / "go").touch()


def _kernel_process(lab) -> psutil.Process:
    (kernel,) = psutil.Process(lab.process.pid).children()
    return kernel


# ------------------------------------------------------------------------------------------------------------- GPUs


def test_it_opens_at_the_right_and_shows_values_as_they_change(open_notebook, machine):
    notebook = open_notebook(_LOAD, _TOGGLE)
    panel = SidebarPage(notebook.page)
    notebook.run(0)
    assert panel.node.is_hidden(), "nobody has asked for it"
    assert "GPU panel: in the right sidebar" in notebook.run(1)
    panel.wait_until_open()
    assert panel.left() > 600
    assert panel.gpus().count() == 8
    chart = panel.gpu(2).locator("canvas").first
    before = panel.picture(chart)
    machine.describe("gpu 2 util 87", "gpu 2 used 40000", "gpu 5 error 15")
    panel.refresh()
    panel.gpu(2).get_by_text("87 %").wait_for()
    assert panel.picture(chart) != before
    # A lost GPU is told by words and colour; the others go on.
    lost = panel.gpu(5)
    lost.get_by_text("Lost", exact=True).wait_for()
    red, green, blue = _colour(lost.get_by_text("Lost", exact=True))
    assert red > 2 * max(green, blue)
    machine.describe("gpu 2 util 12", "gpu 5 error 15")
    panel.refresh()
    panel.gpu(2).get_by_text("12 %").wait_for()

    assert notebook.run(1).strip() == "GPU panel closed; `%air sidebar` opens it"
    panel.wait_until_closed()


def test_sixteen_gpus_are_readable_in_a_narrow_sidebar_and_in_the_dark(open_notebook, machine):
    machine.describe("count 16", *(f"gpu {index} util {5 * index}" for index in range(16)))
    notebook = open_notebook(_LOAD_AND_OPEN)
    notebook.page.set_viewport_size({"width": 1000, "height": 900})
    panel = SidebarPage(notebook.page)
    notebook.run(0)
    panel.wait_until_open()
    assert panel.gpus().count() == 16
    panel.gpu(15).scroll_into_view_if_needed()
    panel.gpu(15).get_by_text("75 %").wait_for()
    assert _sticks_out(panel) == []
    panel.set_width(480)
    assert panel.width() > 400
    assert _sticks_out(panel) == []
    panel.set_width(1)
    assert panel.width() < 260
    assert _sticks_out(panel) == []
    panel.gpu(15).locator("summary").click()
    chart = panel.gpu(15).locator("canvas").first
    light = panel.picture(chart)
    notebook.choose_theme("JupyterLab Dark")
    notebook.page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
    assert eventually(lambda: panel.picture(chart) != light, 10)
    assert max(_colour(panel.node.locator(".air-panel"), "background-color")) < 80
    assert min(_colour(panel.gpu(15))) > 150
    notebook.choose_theme("JupyterLab Light")


def _colour(locator, of="color") -> list[int]:
    text = locator.evaluate("(node, of) => getComputedStyle(node).getPropertyValue(of)", of)
    return [int(each) for each in re.findall(r"\d+", text)[:3]]


def _sticks_out(panel: SidebarPage) -> list[str]:
    """What is beyond the edge of the sidebar, or makes it scroll sideways."""
    found = panel.node.evaluate(
        """panel => [panel, ...panel.querySelectorAll('*')].filter(node => node.checkVisibility() &&
          (node === panel ? node.scrollWidth > node.clientWidth
            : node.getBoundingClientRect().right > panel.getBoundingClientRect().right + 0.5))
        .map(node => `${node.className}: ${node.textContent.slice(0, 60)}`)"""
    )
    return [str(each) for each in found]


# --------------------------------------------------------------------------------------------- while a cell runs


def test_buttons_answer_while_a_cell_keeps_the_kernel_busy_and_after_a_reload_of_the_page(open_notebook, lab, machine):
    notebook = open_notebook(_LOAD_AND_OPEN, _BUSY, _SUBSHELLS)
    panel = SidebarPage(notebook.page)
    notebook.run(0)
    panel.wait_until_open()
    notebook.start(1)
    notebook.wait_for_text(1, "busy")
    machine.describe("gpu 0 util 61")
    panel.refresh()
    panel.gpu(0).get_by_text("61 %").wait_for()
    notebook.wait_for_status("Busy")

    notebook.save_file()
    for _ in range(5):
        notebook.reload()
        panel.wait_until_open(timeout_s=10)
    machine.describe("gpu 0 util 43")
    panel.refresh()
    panel.gpu(0).get_by_text("43 %").wait_for()
    notebook.wait_for_status("Busy")
    assert lab.kernel_state(notebook.name) == "busy"
    _go(lab)
    notebook.wait_for_idle()
    # Ours, and the one that JupyterLab may have made for the comms of widgets.
    assert int(notebook.run(2)) <= 2, "pages that are gone have left their subshells behind"


def test_a_live_run_is_seen_its_log_is_followed_and_stop_ends_it(open_notebook):
    notebook = open_notebook(_LOAD_AND_OPEN, _ENDLESS.format(name="live-run"))
    panel = SidebarPage(notebook.page)
    notebook.run(0)
    panel.wait_until_open()
    notebook.start(1)
    row = panel.wait_for_run("live-run", "Running")
    row.get_by_text("2 ranks · cpu · this notebook").wait_for()
    row.locator(".air-line", has_text=re.compile(r"step \d+")).wait_for()

    panel.press("Logs of live-run")
    log = row.get_by_role("log")
    log.get_by_text("step 3", exact=True).wait_for()
    far = int(re.findall(r"step (\d+)", log.inner_text())[-1]) + 10
    log.get_by_text(f"step {far}", exact=True).wait_for()
    assert log.evaluate("node => node.scrollHeight - node.scrollTop - node.clientHeight < 8")

    panel.press("Stop live-run")
    panel.press("Stop live-run, really")
    panel.wait_for_run("live-run", "Killed")
    row.get_by_text("run live-run was stopped").wait_for()
    row.get_by_text("Complete", exact=True).wait_for()
    notebook.wait(1)
    assert "RunStoppedError" in notebook.output(1)
    assert panel.node.get_by_role("button", name="Stop live-run").is_hidden()


def test_resume_goes_on_from_a_checkpoint_without_a_cell(open_notebook, lab):
    notebook = open_notebook(_LOAD_AND_OPEN, _TRAINING)
    notebook.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    panel = SidebarPage(notebook.page)
    notebook.run(0)
    panel.wait_until_open()
    assert "enough for now" in notebook.run(1, 120)
    panel.refresh()  # not to wait for the interval
    row = panel.checkpoint(4, lab.root)
    row.get_by_text("from first-half").wait_for()

    row.get_by_role("button", name="Copy").click()
    row.get_by_text("Copied: --resume").wait_for()
    copied = notebook.page.evaluate("() => navigator.clipboard.readText()")
    assert copied.startswith(f"--resume '{lab.root}/check points/step_4.")
    row.get_by_role("button", name="Verify").click()
    row.get_by_text("Verified", exact=True).wait_for()

    row.get_by_role("button", name="Resume step 4", exact=True).click()
    row.get_by_role("button", name="Resume step 4, really").click()
    panel.wait_for_run("first-half-2", "Finished")
    panel.press("Logs of first-half-2")
    log = panel.run("first-half-2").get_by_role("log")
    log.get_by_text("<step 7>").wait_for()
    lines = log.inner_text().split("\n")
    assert lines[0].startswith(f"resumed step 4 from {lab.root}")
    assert lines[1:5] == [f"<step {step}>" for step in range(4, 8)]
    panel.refresh()
    panel.checkpoint(8, lab.root).get_by_text("from first-half-2").wait_for()


# ------------------------------------------------------------------------------------------ kernels come and go


def test_after_a_restart_it_says_what_to_run_and_the_next_load_connects_it(open_notebook, lab, machine):
    notebook = open_notebook(_LOAD_AND_OPEN, "1 + 1")
    panel = SidebarPage(notebook.page)
    notebook.run(0)
    panel.wait_until_open()
    notebook.press_restart()
    panel.wait_for_text("The kernel was restarted. Run %load_ext air_nb again.")
    assert panel.gpus().count() == 0
    notebook.wait_for_idle()
    notebook.run(0)
    panel.wait_until_open()
    machine.describe("gpu 1 util 33")
    panel.refresh()
    panel.gpu(1).get_by_text("33 %").wait_for()
    assert notebook.page.locator("#air-nb-panel").count() == 1
    assert notebook.page.locator(".jp-SideBar.jp-mod-right .lm-TabBar-tab[data-id='air-nb-panel']").count() == 1

    os.kill(_kernel_process(lab).pid, signal.SIGKILL)
    panel.wait_for_text("The kernel was restarted. Run %load_ext air_nb again.")
    notebook.page.locator(".jp-Dialog .jp-mod-accept").click()  # Lab says that it has died
    notebook.wait_for_idle()
    notebook.run(0)
    panel.wait_until_open()


def test_two_notebooks_share_one_panel_that_follows_the_one_in_front(open_notebook):
    notebook = open_notebook(_LOAD_AND_OPEN, _ENDLESS.format(name="run-of-one"))
    panel = SidebarPage(notebook.page)
    notebook.run(0)
    panel.wait_until_open()
    notebook.start(1)
    panel.wait_for_run("run-of-one", "Running").get_by_text("this notebook").wait_for()

    notebook.open_another("another.ipynb", [_LOAD, "1"])
    panel.wait_for_text("Run %load_ext air_nb in this notebook.")
    notebook.run(0)
    row = panel.wait_for_run("run-of-one", "Running")
    row.get_by_text(f"2 ranks · cpu · {notebook.name}").wait_for()
    # From another notebook it can be stopped too, and the first one hears of it.
    panel.press("Stop run-of-one")
    panel.press("Stop run-of-one, really")
    panel.wait_for_run("run-of-one", "Killed")

    notebook.bring_to_front(notebook.name)
    panel.wait_for_run("run-of-one", "Killed").get_by_text("this notebook").wait_for()
    notebook.wait(1)
    assert "RunStoppedError" in notebook.output(1)


def test_a_folded_sidebar_gets_no_samples_until_it_is_seen_again(open_notebook):
    notebook = open_notebook(_LOAD, _TOGGLE)
    panel = SidebarPage(notebook.page)
    notebook.run(0)
    notebook.run(1)
    panel.wait_until_open()
    panel.node.get_by_label("Interval of the samples").select_option("1")
    before = panel.samples
    assert _grows(notebook, panel, before, 2)
    notebook.page.get_by_role("button", name="Hide").click()
    panel.wait_until_closed()
    notebook.page.wait_for_timeout(1500)  # one may be on its way
    before = panel.samples
    notebook.page.wait_for_timeout(2500)
    assert panel.samples == before
    notebook.page.locator(".jp-SideBar.jp-mod-right .lm-TabBar-tab[data-id='air-nb-panel']").click()
    assert _grows(notebook, panel, before, 2)


def _grows(notebook: NotebookPage, panel: SidebarPage, before: int, by: int) -> bool:
    """Whether so many samples come; the page has to be asked, else Playwright does not hear of them."""
    for _ in range(100):
        if panel.samples >= before + by:
            return True
        notebook.page.wait_for_timeout(100)
    return False


# ------------------------------------------------------------------------------------------- without the labextension


def test_without_the_labextension_the_panel_is_below_the_cell_and_its_text_is_in_the_file(open_notebook, lab, machine):
    with lab.without_extensions("air-nb"):
        notebook = open_notebook(_LOAD, _TOGGLE)
        assert notebook.page.locator("#air-nb-panel").count() == 0
        panel = SidebarPage(notebook.page, ".jp-OutputArea-output .air-panel")
        notebook.run(0)
        notebook.run(1)
        panel.wait_until_open()
        assert panel.gpus().count() == 8
        machine.describe("gpu 7 util 29")
        panel.refresh()
        panel.gpu(7).get_by_text("29 %").wait_for()
        assert b"NVIDIA H100" in notebook.save_file()
        lab.shut_down_kernels()


def test_without_the_widgets_javascript_the_text_is_shown(open_notebook, lab):
    with lab.without_extensions("air-nb", "@jupyter-widgets/jupyterlab-manager"):
        notebook = open_notebook(_LOAD, _TOGGLE)
        notebook.run(0)
        assert "NVIDIA H100" in notebook.run(1)
