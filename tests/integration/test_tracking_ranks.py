"""MLflow in the ranks of a real launch: all that they log is in the launch's run, and no other run appears."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.kernel import Kernel, running_kernel
from tests.support.mlflow_stores import StoredRun, read_runs, sqlite_store
from tests.support.wait import eventually

_EXPERIMENT = "ranks"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory, test_environment) -> Iterator[Kernel]:
    """A kernel with a store of its own; the tracking process is warm."""
    directory = tmp_path_factory.mktemp("notebook")
    uri = sqlite_store(directory)
    env = {
        "AIR_NB_DEVICE": "cpu",
        "AIR_NB_TRACKING": "on",
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_EXPERIMENT_NAME": _EXPERIMENT,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
        "HF_HUB_OFFLINE": "1",
    }
    with running_kernel(directory, env=env) as running:
        running.ok("%%distributed --nproc 1\npass", timeout_s=180)
        assert eventually(lambda: [run.status for run in read_runs(uri)] == ["FINISHED"], 60)
        yield running


@pytest.fixture
def launch(kernel):
    """Run a cell on ranks; returns its values, the launch's run, and the runs that appeared besides it."""

    def run(
        code: str, options: str = "--nproc 2", timeout_s: float = 300.0
    ) -> tuple[list[Any], StoredRun, list[StoredRun]]:
        uri = ast.literal_eval(kernel.value("__import__('os').environ['MLFLOW_TRACKING_URI']"))
        before = {stored.run_id for stored in read_runs(uri)}
        kernel.ok(f"%%distributed --quiet --out results_ {options}\n{code}", timeout_s)
        assert eventually(lambda: all(stored.status != "RUNNING" for stored in read_runs(uri)), 60)
        new = [stored for stored in read_runs(uri) if stored.run_id not in before]
        launched = [stored for stored in new if stored.parent is None]
        assert len(launched) == 1, [stored.name for stored in new]
        assert (launched[0].experiment, launched[0].status) == (_EXPERIMENT, "FINISHED")
        return (
            ast.literal_eval(kernel.value("results_")),
            launched[0],
            [each for each in new if each.parent is not None],
        )

    return run


def test_every_rank_logs_into_the_launchs_run_and_nothing_is_lost(launch):
    values, run, others = launch(
        """
import mlflow
rank = int(__import__("os").environ["RANK"])
for step in range(1000):
    mlflow.log_metric(f"loss_{rank}", step / 4, step=step)
mlflow.log_param(f"p_{rank}", rank)
mlflow.set_tag(f"t_{rank}", rank)
mlflow.log_text(f"of {rank}", f"notes/{rank}.txt")
mlflow.active_run().info.run_id
"""
    )

    assert values == [run.run_id] * 2
    assert others == []
    for rank in range(2):
        assert run.metrics[f"loss_{rank}"] == [(step, step / 4) for step in range(1000)]
        assert run.params[f"p_{rank}"] == run.tags[f"t_{rank}"] == str(rank)
        assert run.artifacts[f"notes/{rank}.txt"].read_text() == f"of {rank}"


def test_log_metrics_needs_no_mlflow_in_the_rank(launch):
    values, run, _ = launch(
        """
import sys
from air_nb import runtime
for step in range(100):
    runtime.log_metrics({f"loss_{runtime.get_rank()}": step}, step=step, every=10)
"mlflow" in sys.modules
"""
    )

    assert values == [False, False]
    for rank in range(2):
        assert run.metrics[f"loss_{rank}"] == [(step, float(step)) for step in range(0, 100, 10)]


def test_what_a_rank_has_logged_it_reads_back(launch):
    values, _, _ = launch(
        """
import mlflow
from mlflow import MlflowClient
mlflow.log_metric("loss", 0.5, step=3)
mlflow.log_param("lr", 0.1)
run_id = mlflow.active_run().info.run_id
read = mlflow.get_run(run_id)
[read.data.metrics["loss"], read.data.params["lr"], [m.step for m in MlflowClient().get_metric_history(run_id, "loss")]]
""",
        "--nproc 1",
    )
    assert values == [[0.5, "0.1", [3]]]


def test_runs_that_a_cell_starts_itself(launch):
    values, run, (child,) = launch(
        """
import mlflow
mlflow.set_experiment("ranks")
with mlflow.start_run(run_name="chosen in the cell") as mine:
    mlflow.log_metric("a", 1)
    with mlflow.start_run(nested=True, run_name="kid"):
        mlflow.log_metric("b", 2)
mlflow.end_run()
mlflow.log_metric("c", 3)
mine.info.run_id
""",
        "--nproc 1",
    )

    assert values == [run.run_id]
    assert run.name == "chosen in the cell"
    assert sorted(run.metrics) == ["a", "c"]
    assert (child.name, child.parent, child.status, list(child.metrics)) == ("kid", run.run_id, "FINISHED", ["b"])


def test_another_experiment_is_refused_before_the_training(kernel):
    cell = kernel.run(
        '%%distributed --nproc 1\nimport mlflow\nmlflow.set_experiment("elsewhere")\nprint("trained")', 120
    )

    assert "--experiment NAME" in cell.traceback
    assert "trained" not in cell.stream()


def test_a_rank_that_takes_a_child_of_it_along_logs_from_there_too(launch):
    _, run, others = launch(
        """
import mlflow, torch
from air_nb import runtime

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        mlflow.log_metric("read_by_worker", index, step=index)
        return index

mlflow.active_run()
sum(len(batch) for batch in torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork"))
""",
        "--nproc 1",
    )
    assert run.metrics["read_by_worker"] == [(step, float(step)) for step in range(8)]
    assert others == []


# ------------------------------------------------------------------------------------------------------ libraries

_MODEL = """
import torch
import lightning as pl

class Tiny(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.save_hyperparameters({"width": 4})

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=4)
common = dict(
    max_epochs=1, log_every_n_steps=1, accelerator="cpu", devices=2, strategy="ddp", enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False,
)
"""


@pytest.mark.slow
def test_lightnings_logger(launch):
    pytest.importorskip("lightning")
    values, run, others = launch(
        _MODEL
        + """
from lightning.pytorch.loggers import MLFlowLogger
logger = MLFlowLogger(experiment_name="lightning_logs", tags={"team": "a"})
pl.Trainer(logger=logger, **common).fit(Tiny(), data)
logger.run_id
"""
    )

    assert others == []
    assert values[0] == run.run_id
    assert len(run.metrics["loss"]) == 4
    assert run.params["width"] == "4"
    assert run.tags["team"] == "a"


@pytest.mark.slow
def test_autolog_of_pytorch(launch):
    pytest.importorskip("lightning")
    _, run, others = launch(
        "import mlflow\nmlflow.pytorch.autolog(log_models=False)"
        + _MODEL
        + "pl.Trainer(logger=False, **common).fit(Tiny(), data)\nNone"
    )

    assert others == []
    assert run.params["optimizer_name"] == "SGD"
    assert run.metrics["loss"]


@pytest.mark.slow
def test_autolog_of_sklearn_on_every_rank(launch):
    _, run, others = launch(
        """
import mlflow, numpy
mlflow.autolog(log_models=False)
from sklearn.linear_model import Ridge
Ridge(alpha=0.5).fit(numpy.arange(8.0).reshape(8, 1), numpy.arange(8.0))
None
"""
    )

    assert others == []
    assert run.params["alpha"] == "0.5"
    assert "training_mean_squared_error" in run.metrics


@pytest.mark.slow
def test_transformers(launch):
    pytest.importorskip("transformers")
    _, run, others = launch(
        """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
config = BertConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50
)
examples = [{"input_ids": torch.randint(0, 50, (8,)), "labels": torch.tensor(i % 2)} for i in range(16)]
arguments = TrainingArguments(
    "trained", report_to="mlflow", num_train_epochs=1, logging_steps=1, per_device_train_batch_size=4, use_cpu=True,
    disable_tqdm=True, save_strategy="no",
)
Trainer(BertForSequenceClassification(config), arguments, train_dataset=examples).train()
None
"""
    )

    assert others == []
    assert run.params["hidden_size"] == "16"
    assert [step for step, _ in run.metrics["loss"]] == [1, 2]


@pytest.mark.slow
def test_accelerate(launch):
    pytest.importorskip("accelerate")
    _, run, others = launch(
        """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, log_with="mlflow", project_dir="accelerated")
accelerator.init_trackers("a project", config={"lr": 0.1})
for step in range(3):
    accelerator.log({"loss": 1.0}, step=step)
accelerator.end_training()
"""
    )

    assert others == []
    assert run.params["lr"] == "0.1"
    assert [step for step, _ in run.metrics["loss"]] == [0, 1, 2]
