"""Launches as MLflow runs, as the user of a notebook or a script sees them: which, in which experiment, complete."""

from __future__ import annotations

import ast
import json
import os
import site
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from air_nb.runs.directory import all_runs
from tests.support.kernel import Kernel, running_kernel
from tests.support.mlflow_servers import silent_server
from tests.support.mlflow_stores import StoredRun, read_runs, sqlite_store
from tests.support.wait import eventually

_PATIENCE_S = 120.0
_NOTEBOOK = "/home/me/A study.ipynb"
_STATE = (
    "(dict(__import__('os').environ), mlflow.active_run() and mlflow.active_run().info.run_id, "
    "mlflow.get_tracking_uri(), mlflow.get_registry_uri())"
)


class Notebook:
    """A kernel, and the store that MLflow takes by default in its directory."""

    def __init__(self, kernel: Kernel, store: str) -> None:
        self.kernel = kernel
        self.store = store
        self.ok = kernel.ok
        self.run = kernel.run
        self.value = kernel.value

    def runs(self) -> list[StoredRun]:
        return read_runs(self.store)

    def launch(self, code: str, options: str = "--nproc 1 --quiet", *, above: str = "") -> StoredRun:
        """Run a cell on the ranks; its run, when MLflow has all of it. No other run has appeared."""
        before = {run.run_id for run in self.runs()}
        self.ok(f"{above}%%distributed {options}\n{code}", 120)
        return self.new_run(before)

    def new_run(self, before: set[str]) -> StoredRun:
        assert eventually(lambda: all(run.status != "RUNNING" for run in self.new(before)), _PATIENCE_S)
        (run,) = self.new(before)
        return run

    def new(self, before: set[str]) -> list[StoredRun]:
        return [run for run in self.runs() if run.run_id not in before]

    def state(self) -> tuple[dict[str, str], str | None, str, str]:
        state: tuple[dict[str, str], str | None, str, str] = ast.literal_eval(self.value(_STATE))
        return state


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, test_environment: Path) -> Iterator[Notebook]:
    """A notebook with MLflow's default store; the tracking process is warm."""
    directory = tmp_path_factory.mktemp("notebook")
    store = sqlite_store(directory)
    with running_kernel(directory, env=_environment(JPY_SESSION_NAME=_NOTEBOOK)) as kernel:
        kernel.ok("%%distributed --nproc 1\npass", timeout_s=180)
        assert eventually(lambda: [run.status for run in read_runs(store)] == ["FINISHED"], _PATIENCE_S)
        kernel.ok("import mlflow, os", timeout_s=120)
        yield Notebook(kernel, store)


def _environment(**more: str) -> dict[str, str]:
    return {
        "AIR_NB_DEVICE": "cpu",
        "AIR_NB_TRACKING": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
        **more,
    }


# ------------------------------------------------------------------------------------------ what training waits for

_TRAINING = """
import time, torch
from air_nb.checkpoint import CheckpointManager
from air_nb.data import DataLoader, FileDataset
from air_nb.data.cache import Cache
from air_nb.runtime import init_process_group

init_process_group()
def decode(path):
    time.sleep(0.1)
    return torch.ones(2)
loader = DataLoader(FileDataset("files", decode=decode, cache=Cache("cache")), batch_size=1, num_workers=0)
with CheckpointManager("checkpoints", model=torch.nn.Linear(2, 1), data=loader, every=10) as manager:
    for step, batch in manager.steps(epochs=2):
        pass
"""
_ROWS = (
    "[(row.run_id, row.figures) for row in "
    "__import__('air_nb.session.panel', fromlist=['_']).PanelActions(None).runs()]"
)


def test_what_loading_and_saving_cost_is_in_the_run_and_in_the_panel(notebook):
    folder = Path(notebook.kernel.cwd) / "files"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.bin").write_bytes(b"x" * 500)
    run = notebook.launch(_TRAINING, "--nproc 2 --quiet")

    for rank in range(2):
        passes = [f"air_nb/{name}/rank_{rank}" for name in ("data_wait_percent", "data_examples_per_second")]
        for key in (*passes, f"air_nb/data_longest_wait_seconds/rank_{rank}"):
            assert [step for step, _ in run.metrics[key]] == [10, 20], "a line for each pass of more than a second"
        assert all(50 < value <= 100 for _, value in run.metrics[passes[0]]), "decoding takes most of the time"
        assert all(1 < value <= 10 for _, value in run.metrics[passes[1]])
        assert run.metrics[f"air_nb/cache_hit_percent/rank_{rank}"][1] == (20, 100.0)
    assert sum(run.metrics[f"air_nb/cache_fetched_bytes/rank_{rank}"][-1][1] for rank in range(2)) == 20 * 500
    assert [step for step, _ in run.metrics["air_nb/checkpoint_stall_seconds"]] == [10, 20]
    assert all(value > 0 for _, value in run.metrics["air_nb/checkpoint_save_seconds"])
    assert run.metrics["air_nb/checkpoint_bytes"][0][1] > 0

    rows = dict(ast.literal_eval(notebook.value(_ROWS)))
    figures = rows[run.tags["air_nb.run_id"]]
    assert "(rank " in figures
    assert figures.startswith("data wait ")
    assert "100 % from the cache · 9.77 KiB downloaded · last save held up training for " in figures


# ------------------------------------------------------------------------------------------------- which experiment


def test_a_cell_is_a_run_in_the_experiment_of_its_notebook(notebook):
    notebook.ok("lr = 0.5\nsecret_list = [31337] * 100")
    run = notebook.launch("print('hello', lr, len(secret_list))")

    assert (run.status, run.experiment, run.parent) == ("FINISHED", "A study", None)
    assert run.name
    assert run.tags["mlflow.source.name"] == _NOTEBOOK
    assert run.params["air_nb.nproc_per_node"] == "1"
    assert {"air_nb.nnodes", "air_nb.device", "air_nb.devices", "air_nb.torch", "air_nb.cuda"} <= set(run.params)
    assert run.artifacts["cell.py"].read_text() == "print('hello', lr, len(secret_list))\n"
    assert run.artifacts["logs/rank_0.out"].read_text() == "hello 0.5 100\n"
    sizes = json.loads(run.artifacts["captured.json"].read_text())
    assert set(sizes) == {"lr", "secret_list"}
    assert "31337" not in "".join([*run.params.values(), *run.tags.values(), json.dumps(sizes)])
    assert run.artifact_root.is_relative_to(notebook.kernel.cwd)


def test_name_and_experiment_are_the_users_if_given(notebook):
    run = notebook.launch("pass", "--nproc 1 --quiet --name 'my run' --experiment 'my experiment'")
    assert (run.name, run.experiment) == ("my run", "my experiment")


def test_the_experiment_is_the_first_of_option_active_run_set_experiment_and_variable(notebook):
    notebook.ok("os.environ['MLFLOW_EXPERIMENT_NAME'] = 'by variable'")
    try:
        assert notebook.launch("pass").experiment == "by variable"
        notebook.ok("mlflow.set_experiment('by call')")
        assert notebook.launch("pass").experiment == "by call"
        before = {run.run_id for run in notebook.runs()}
        notebook.ok(
            "other = mlflow.create_experiment('of the active run')\nmine = mlflow.start_run(experiment_id=other)\n"
        )
        notebook.ok("%%distributed --nproc 1 --quiet\npass", 120)
        notebook.ok("mlflow.end_run()")
        assert eventually(lambda: all(run.status == "FINISHED" for run in notebook.new(before)), _PATIENCE_S)
        assert [run.experiment for run in notebook.new(before)] == ["of the active run"] * 2
        assert notebook.launch("pass", "--nproc 1 --quiet --experiment option").experiment == "option"
    finally:
        notebook.ok(
            "[os.environ.pop(n, None) for n in ('MLFLOW_EXPERIMENT_NAME', 'MLFLOW_EXPERIMENT_ID')]\n"
            "mlflow.tracking.fluent._active_experiment_id = None"
        )


# ------------------------------------------------------------------------------------------- the user's active run


def test_a_launch_under_an_active_run_is_its_child_and_leaves_it_active(notebook):
    before = {run.run_id for run in notebook.runs()}
    notebook.ok("mine = mlflow.start_run(run_name='sweep')\nmlflow.log_param('mine', 1)")
    state = notebook.state()
    for lr in (1, 2):
        notebook.ok(f"lr = {lr}")
        notebook.ok("%%distributed --nproc 2 --quiet\nimport mlflow\nmlflow.log_metric('lr', lr)", 120)
        assert notebook.state() == state
    parent = next(run for run in notebook.new(before) if run.name == "sweep")
    assert parent.status == "RUNNING"
    notebook.ok("mlflow.log_metric('after', 1.0)\nmlflow.end_run()")
    assert eventually(lambda: all(run.status == "FINISHED" for run in notebook.new(before)), _PATIENCE_S)
    parent, *children = sorted(notebook.new(before), key=lambda run: run.name != "sweep")
    assert (set(parent.metrics), parent.parent) == ({"after"}, None)
    assert [(child.parent, {v for _, v in child.metrics["lr"]}) for child in children] == [
        (parent.run_id, {1.0}),
        (parent.run_id, {2.0}),
    ]


def test_a_run_given_by_mlflow_run_id_is_resumed_and_the_variable_stays(notebook):
    before = {run.run_id for run in notebook.runs()}
    notebook.ok(
        "with mlflow.start_run(run_name='earlier') as earlier:\n"
        "    mlflow.log_params({'lr': 1, 'air_nb.device': 'other'})\n"
        "os.environ['MLFLOW_RUN_ID'] = earlier.info.run_id"
    )
    try:
        state = notebook.value("dict(os.environ)")
        notebook.ok("%%distributed --nproc 2 --quiet\nimport mlflow\nmlflow.log_metric('resumed', 1.0)", 120)
        assert notebook.value("dict(os.environ)") == state
        (run,) = notebook.new(before)
        assert eventually(lambda: notebook.new(before)[0].status == "FINISHED", _PATIENCE_S)
        (run,) = notebook.new(before)
        assert run.metrics["resumed"]
        assert run.params["lr"] == "1"
        assert (run.params["air_nb.device"], run.tags["air_nb.device"]) == ("other", "cpu")
    finally:
        notebook.ok("del os.environ['MLFLOW_RUN_ID']")


# --------------------------------------------------------------------------------------------------- switched off


@pytest.mark.parametrize(
    "before, options",
    [("", "--no-mlflow"), ("os.environ['AIR_NB_TRACKING'] = '0'", ""), ("%env AIR_NB_TRACKING=off", "")],
)
def test_a_launch_that_is_not_to_be_tracked_leaves_no_trace_in_mlflow(notebook, before, options):
    known = {run.run_id for run in notebook.runs()}
    notebook.ok(before)
    try:
        cell = notebook.ok(f"%%distributed --nproc 1 {options}\nimport os\nprint('MLFLOW_TRACKING_URI' in os.environ)")
        assert "False" in cell.text
        assert "mlflow" not in cell.text.lower().replace("mlflow_tracking_uri", "")
        assert "tracked" not in cell.text
        assert "%air ui" not in cell.text
    finally:
        notebook.ok("os.environ['AIR_NB_TRACKING'] = '1'")
    notebook.launch("pass")  # the next one is: it comes after anything that the first may have left
    assert len(notebook.new(known)) == 1


def test_tracking_false_leaves_no_trace_either(notebook):
    known = {run.run_id for run in notebook.runs()}
    notebook.ok(
        "from air_nb import distributed\n"
        "@distributed(nproc=1, device='cpu', tracking=False)\ndef train():\n    return 1\n"
        "assert train.distributed() == [1]"
    )
    run = notebook.launch("pass")
    assert [each.run_id for each in notebook.new(known)] == [run.run_id]


def test_a_cell_that_fails_before_anything_starts_is_no_run(notebook):
    known = {run.run_id for run in notebook.runs()}
    notebook.ok("handle = open('/dev/null')")
    assert notebook.run("%%distributed --nproc 1\nhandle").error["ename"] == "CaptureError"
    notebook.ok("handle.close()")
    notebook.ok("device = os.environ.pop('AIR_NB_DEVICE')")
    assert "UsageError" in notebook.run("%%distributed --gpus 64 --device cuda\npass").text
    notebook.ok("os.environ['AIR_NB_DEVICE'] = device")
    run = notebook.launch("pass")
    assert [each.run_id for each in notebook.new(known)] == [run.run_id]


# ------------------------------------------------------------------------------------------------------- what is shown


def test_the_link_is_in_header_and_footer(notebook):
    text = notebook.ok("%%distributed --nproc 1 --name linked\nprint('line')", 120).text
    header, line, footer = text.strip().splitlines()
    assert header.startswith("run linked")
    assert "MLflow" in header
    assert line == "line"
    assert footer.startswith("FINISHED in")
    assert "MLflow" in footer


def test_quiet_and_capture_show_nothing_of_mlflow(notebook):
    assert notebook.ok("%%distributed --nproc 1 --quiet\nprint('line')", 120).text == "line\n"
    assert notebook.ok("%%capture got\n%%distributed --nproc 1\nprint('line')", 120).text == ""
    assert "line" in ast.literal_eval(notebook.value("got.stdout")).splitlines()
    assert notebook.value("got.stderr") == "''"


# -------------------------------------------------------------------------------------------------------- complete


def test_the_next_cell_finds_the_run_complete(notebook):
    notebook.ok(
        "%%distributed --nproc 2 --name found --quiet\nimport mlflow\n"
        'for step in range(300):\n    mlflow.log_metric(f\'m{__import__("os").environ["RANK"]}\', step, step=step)',
        120,
    )
    found = notebook.value(
        "[(r.info.status, sorted(r.data.metrics.items())) for r in mlflow.search_runs(experiment_names=['A study'], "
        "filter_string=\"attributes.run_name = 'found'\", output_format='list')]"
    )
    assert found == "[('FINISHED', [('m0', 299.0), ('m1', 299.0)])]"


def test_the_decorator_is_tracked_likewise(notebook):
    before = {run.run_id for run in notebook.runs()}
    notebook.ok(
        "@distributed(nproc=2, device='cpu', experiment='of the decorator', name='decorated')\n"
        "def train(lr):\n    import mlflow\n    mlflow.log_metric('lr', lr)\n    return lr\n"
        "assert train.distributed(lr=0.25) == [0.25, 0.25]",
        120,
    )
    run = notebook.new_run(before)
    assert (run.name, run.experiment, run.status) == ("decorated", "of the decorator", "FINISHED")
    assert {value for _, value in run.metrics["lr"]} == {0.25}
    assert "def train(lr):" in run.artifacts["cell.py"].read_text()


def test_two_launches_at_once_are_two_runs_with_their_own_values(notebook):
    before = {run.run_id for run in notebook.runs()}
    notebook.ok(
        """
import threading
@distributed(nproc=2, device='cpu')
def train(value):
    import mlflow
    for step in range(100):
        mlflow.log_metric('value', value, step=step)
    return mlflow.active_run().info.run_id
got = {}
threads = [threading.Thread(target=lambda n=n: got.update({n: train.with_overrides(name=f'both{n}').distributed(n)}))
           for n in (1, 2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
""",
        180,
    )
    got = ast.literal_eval(notebook.value("got"))
    assert eventually(lambda: all(run.status == "FINISHED" for run in notebook.new(before)), _PATIENCE_S)
    runs = {run.name: run for run in notebook.new(before)}
    assert set(runs) == {"both1", "both2"}
    for number in (1, 2):
        run = runs[f"both{number}"]
        assert got[number] == [run.run_id] * 2
        assert {value for _, value in run.metrics["value"]} == {float(number)}
        assert {step for step, _ in run.metrics["value"]} == set(range(100))


@pytest.mark.slow
def test_eight_ranks_that_log_a_thousand_times_lose_nothing(notebook):
    run = notebook.launch(
        "import mlflow, os\nrank = os.environ['RANK']\nfor step in range(1000):\n"
        "    mlflow.log_metric(f'loss_{rank}', step / 2, step=step)",
        "--nproc 8 --quiet",
    )
    expected = [(step, step / 2) for step in range(1000)]
    assert all(run.metrics[f"loss_{rank}"] == expected for rank in range(8))


# --------------------------------------------------------------------------------------------------------- scripts


_SCRIPT = """
from air_nb import distributed

@distributed(nproc=2, device="cpu")
def train():
    import os
    print("hello", flush=True)
    {body}

if __name__ == "__main__":
    {main}
"""


def _run_script(folder: Path, body: str, *, main: str = "train.distributed()", command=(), **env: str):
    path = folder / "train_it.py"
    path.write_text(_SCRIPT.format(body=body, main=textwrap.indent(main, "    ").strip()))
    environment = {**os.environ, **_environment(**env)}
    return subprocess.run(
        [sys.executable, *command, str(path)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_the_run_of_a_script_that_ends_at_once_is_complete_when_it_has_ended(tmp_path):
    store = sqlite_store(tmp_path)
    done = _run_script(tmp_path, "return 1", JPY_SESSION_NAME=_NOTEBOOK)  # as from a cell: `!python train_it.py`
    assert done.returncode == 0, done.stderr
    (run,) = read_runs(store)
    assert (run.status, run.experiment) == ("FINISHED", "train_it")
    assert run.tags["mlflow.source.name"] == str(tmp_path / "train_it.py")
    assert run.artifacts["logs/rank_1.out"].read_text() == "hello\n"


def test_the_run_of_a_script_that_fails_is_complete_too(tmp_path):
    store = sqlite_store(tmp_path)
    done = _run_script(tmp_path, "1 / 0")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    (run,) = read_runs(store)
    assert (run.status, run.tags["air_nb.failure"]) == ("FAILED", "ZeroDivisionError: division by zero")


def test_a_script_that_is_over_before_its_server_has_not_answered_says_so_at_its_end(tmp_path):
    with silent_server() as culprit:
        done = _run_script(tmp_path, "return 1", MLFLOW_TRACKING_URI=culprit.uri)
        assert done.returncode == 0
        (warning,) = done.stderr.splitlines()
        assert culprit.uri in warning
        assert "%air runs --upload" in warning


def test_without_mlflow_everything_works_and_one_line_says_how_to_get_it_once(tmp_path):
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(site.getsitepackages()[0]).iterdir():
        if not entry.name.startswith("mlflow"):
            (packages / entry.name).symlink_to(entry)
    root = Path(__file__).parents[2]
    done = _run_script(
        tmp_path,
        "return 1",
        main="print(train.distributed(), train.distributed())",
        command=("-S",),
        PYTHONPATH=f"{packages}{os.pathsep}{root}",
    )
    assert done.returncode == 0, done.stderr
    assert "[1, 1] [1, 1]" in done.stdout
    text = done.stdout + done.stderr
    assert text.count("pip install 'air_nb[mlflow]'") == 1
    directory, _ = next(iter(all_runs()))
    assert not (directory.path / "tracking.json").exists()
