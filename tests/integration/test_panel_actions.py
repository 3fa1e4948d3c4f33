"""The panel's tables and buttons in a real kernel, while its main thread is in a cell."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from air_nb.runs.directory import find_run
from tests.support.kernel import Kernel, running_kernel

_SETUP = """
import threading
from air_nb.session.panel import PanelActions
from air_nb.session.session import get_session
panel = PanelActions(get_session())

def row_of(name):
    return next((row for row in panel.runs() if row.name == name), None)

def meanwhile(action):
    thread = threading.Thread(target=action)
    thread.start()
    return thread
"""

_CHECKPOINT = """
import torch
from air_nb.checkpoint import CheckpointManager
from air_nb.data import DataLoader
from air_nb.runtime import init_process_group

init_process_group()
loader = DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=1, num_workers=0)
with CheckpointManager("checkpoints", model=torch.nn.Linear(2, 1), data=loader, every=1, keep=50) as manager:
    for step, _ in manager.steps():
        pass
"""


@pytest.fixture(scope="module")
def panelled(kernel: Kernel) -> Kernel:
    kernel.ok(_SETUP)
    return kernel


def _value(kernel: Kernel, expression: str) -> Any:
    return ast.literal_eval(kernel.value(expression))


def test_a_cell_that_is_followed_is_seen_and_stopped_as_by_air_stop(panelled: Kernel):
    panelled.ok(
        "seen = []\n"
        "def watch():\n"
        "    while not (row := row_of('watched')) or row.state == 'STARTING' or row.line != 'last 1':\n"
        "        time.sleep(0.02)\n"
        "    seen.append((row.state, row.is_live, row.is_mine, row.can_resume))\n"
        "    while 'last' not in (text := panel.log(row.run_id, 1, -1).text):\n"
        "        time.sleep(0.02)\n"
        "    seen.append(text)\n"
        "    seen.append(panel.stop(row.run_id))\n"
        "import time; thread = meanwhile(watch)"
    )
    cell = panelled.run(
        "%%distributed --nproc 2 --name watched\nimport os, time\n"
        "print('from', os.environ['RANK'])\nprint('last 1', flush=True)\ntime.sleep(600)",
        timeout_s=90,
    )
    assert cell.error is not None
    assert cell.error["ename"] == "RunStoppedError"
    assert "the run was stopped: Stop in the panel." in cell.traceback
    panelled.ok("thread.join()")
    assert _value(panelled, "seen") == [
        ("RUNNING", True, True, False),
        "from 1\nlast 1\n",
        "run watched was stopped",
    ]
    assert _value(panelled, "[(row_of('watched').state, row_of('watched').reason)]") == [
        ("KILLED", "Stop in the panel")
    ]


def test_runs_of_another_notebook_are_seen_and_stopped(panelled: Kernel, tmp_path: Path):
    with running_kernel(tmp_path, env={"AIR_NB_DEVICE": "cpu", "JPY_SESSION_NAME": "/home/me/other.ipynb"}) as other:
        cell = other.start("%%distributed --nproc 1 --name elsewhere\nimport time\nprint('go')\ntime.sleep(600)")
        other.follow(cell, until=lambda cell: "go" in cell.text, timeout_s=90)
        row = "[(row.notebook, row.is_mine, row.is_live) for row in [row_of('elsewhere')]]"
        assert _value(panelled, row) == [("other.ipynb", False, True)]
        assert "was stopped" in panelled.value("panel.stop(row_of('elsewhere').run_id)")
        other.follow(cell, timeout_s=30)
    assert cell.error is not None
    assert cell.error["ename"] == "RunStoppedError"
    assert _value(panelled, "row_of('elsewhere').can_resume") is True


def test_checkpoints_are_listed_and_verified_without_torch(tmp_path: Path):
    with running_kernel(tmp_path, env={"AIR_NB_DEVICE": "cpu"}) as kernel:
        kernel.ok(_SETUP)
        kernel.ok(f"%%distributed --nproc 2 --name writer\n{_CHECKPOINT}", timeout_s=90)
        mine = f"next(root for root in panel.checkpoints() if root.root == {str(tmp_path / 'checkpoints')!r})"
        rows = _value(kernel, f"[(row.step, row.run_name, row.state, row.can_resume) for row in ({mine}).checkpoints]")
        assert rows == [(2, "writer", "committed", True), (1, "writer", "committed", True)]
        assert "every byte" in kernel.value(f"panel.verify(({mine}).checkpoints[0].path)")
        assert _value(kernel, f"[row.verified for row in ({mine}).checkpoints]") == [True, None]
        assert _value(kernel, "[name in __import__('sys').modules for name in ('torch', 'mlflow')]") == [False, False]
        assert find_run("writer")[1].notebook is None
