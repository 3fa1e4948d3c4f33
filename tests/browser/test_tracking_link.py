"""A click on the link in a run's header, in a real JupyterLab page: MLflow starts behind Jupyter and shows the run."""

from __future__ import annotations

import pytest

from tests.browser.lab import BASE_URL
from tests.browser.sidebar_page import SidebarPage

pytest.importorskip("mlflow")
pytest.importorskip("jupyter_server_proxy")

_START_S = 120.0

_LOAD = "%env AIR_NB_TRACKING=1\n%env AIR_NB_SIDEBAR=1\n%load_ext air_nb"
_TRAIN = """\
%%distributed --nproc 2 --name calm-otter-41
import mlflow
from air_nb.runtime import get_rank
if get_rank() == 0:
    for step in range(5):
        mlflow.log_metric("training_loss", 0.4375 + 1 / (step + 1), step=step)
"""


def test_a_click_on_the_header_opens_the_page_of_the_run_with_the_metric_of_the_cell(open_notebook, lab, screenshots):
    notebook = open_notebook(_LOAD, _TRAIN)
    notebook.run(0)
    notebook.run(1, _START_S)
    links = notebook.page.locator(".jp-OutputArea-output a", has_text="MLflow")
    assert links.count() == 2, "in the header and in the footer"
    assert str(links.first.get_attribute("href")).startswith(f"{BASE_URL}air-nb-mlflow/open?run=")
    with notebook.page.expect_popup() as opened:
        links.first.click()
    page = opened.value
    page.wait_for_url(f"**{BASE_URL}proxy/*/#/experiments/*/runs/*", timeout=_START_S * 1000)
    page.get_by_text("calm-otter-41").first.wait_for(timeout=_START_S * 1000)
    page.get_by_text("training_loss").first.wait_for()
    page.get_by_text("0.6375").first.wait_for()
    (screenshots / "mlflow_run.png").write_bytes(page.screenshot())

    row = SidebarPage(notebook.page).wait_for_run("calm-otter-41", "Finished")
    with notebook.page.expect_popup() as opened:
        row.get_by_role("link", name="MLflow").click()
    opened.value.wait_for_url(page.url, timeout=_START_S * 1000)
