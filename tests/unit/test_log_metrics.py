"""``air_nb.runtime.log_metrics``: where the metrics go in a tracked launch, in an untracked one, and outside."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import types
import warnings
from typing import Any

import pytest

from air_nb import runtime
from air_nb.protocol.tracking import REQUEST_FILE, spool_name
from air_nb.tracking import plain, spool
from tests.support.mlflow_stores import read_runs, sqlite_store


@pytest.fixture
def tracked(tmp_path, monkeypatch):
    """As in rank 1 of a tracked launch; returns what has been spooled."""
    monkeypatch.setenv("AIR_NB_RUN_ID", "r1")
    monkeypatch.setenv("AIR_NB_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    (tmp_path / REQUEST_FILE).touch()
    spool.rank_spool.cache_clear()
    yield lambda: spool.read(tmp_path / spool_name(1), 0, 1 << 20).entries
    os.close(spool.rank_spool(tmp_path, 1)._fd)
    spool.rank_spool.cache_clear()


@pytest.fixture
def outside(monkeypatch):
    for name in ("AIR_NB_RUN_ID", "AIR_NB_RUN_DIR", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    plain._warn.cache_clear()


def test_all_metrics_of_a_step_are_one_entry_of_the_ranks_spool(tracked):
    before_ms = int(time.time() * 1000)
    runtime.log_metrics({"loss": 0.5, "acc": 1}, step=7)

    (entry,) = tracked()
    (loss, acc) = entry.metrics
    assert (loss[0], loss[1], loss[3]) == ("loss", 0.5, 7)
    assert (acc[0], acc[1], acc[3]) == ("acc", 1.0, 7)
    assert before_ms <= loss[2] == acc[2] <= time.time() * 1000


def test_a_run_that_is_not_tracked_spools_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("AIR_NB_RUN_ID", "r1")
    monkeypatch.setenv("AIR_NB_RUN_DIR", str(tmp_path))
    runtime.log_metrics({"loss": 0.5}, step=7)
    assert list(tmp_path.iterdir()) == []


def test_only_every_so_many_steps_are_logged_and_the_others_are_not_even_read(tracked):
    read = []

    class Value:
        def __float__(self):
            read.append(1)
            return 0.5

    for step in range(25):
        runtime.log_metrics({"loss": Value()}, step=step, every=10)

    assert [entry.metrics[0][3] for entry in tracked()] == [0, 10, 20]
    assert len(read) == 3


def test_a_tensor_will_do(tracked):
    import torch

    runtime.log_metrics({"loss": torch.tensor([0.25], requires_grad=True)}, step=3)

    assert tracked()[0].metrics[0][1::2] == (0.25, 3)


@pytest.mark.parametrize("every", [0, -1])
def test_every_is_positive(tracked, every):
    with pytest.raises(ValueError, match=f"every={every}"):
        runtime.log_metrics({"loss": 1.0}, step=1, every=every)


def test_what_is_no_number_raises_at_the_call(tracked):
    words: Any = "much"
    with pytest.raises(ValueError, match="much"):
        runtime.log_metrics({"loss": words}, step=1)
    assert tracked() == []


def test_in_an_untracked_launch_nothing_is_logged_and_nothing_is_said(outside, monkeypatch, tmp_path):
    monkeypatch.setenv("AIR_NB_RUN_ID", "r1")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime.log_metrics({"loss": 1.0}, step=1)
    assert list(tmp_path.iterdir()) == []


def test_outside_a_launch_and_without_a_run_it_warns_once_at_the_callers_line(outside):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3):
            runtime.log_metrics({"loss": 1.0}, step=step)

    (warning,) = said
    assert "no MLflow run is active" in str(warning.message)
    assert warning.filename == __file__


def test_outside_a_launch_mlflow_is_not_imported_for_nothing(outside):
    code = """
        import sys, warnings
        warnings.simplefilter("ignore")
        from air_nb import runtime
        runtime.log_metrics({"loss": 1.0}, step=0)
        print("mlflow" in sys.modules)
    """
    assert _run(code).stdout.split() == ["False"]


def test_outside_a_launch_the_active_run_gets_them_in_the_background(outside, monkeypatch):
    calls = []
    fake: Any = types.ModuleType("mlflow")
    fake.active_run = lambda: "a run"
    fake.log_metrics = lambda *args, **kwargs: calls.append((args, kwargs))
    monkeypatch.setitem(sys.modules, "mlflow", fake)

    runtime.log_metrics({"loss": 1}, step=4, every=2)
    runtime.log_metrics({"loss": 1}, step=5, every=2)

    assert calls == [(({"loss": 1.0},), {"step": 4, "synchronous": False})]


@pytest.mark.parametrize("how", ["active", "by id"])
def test_in_a_plain_script_all_has_reached_the_store_when_the_run_ends(outside, tmp_path, how):
    uri = sqlite_store(tmp_path)
    begin = "mlflow.start_run()" if how == "active" else "os.environ['MLFLOW_RUN_ID'] = made.info.run_id"
    code = f"""
        import os, mlflow
        from air_nb import runtime
        mlflow.set_tracking_uri({uri!r})
        made = mlflow.MlflowClient().create_run("0") if {how == "by id"} else None
        {begin}
        for step in range(100):
            runtime.log_metrics({{"loss": step / 2}}, step=step, every=10)
        mlflow.end_run()
    """
    _run(code)

    (run,) = read_runs(uri)
    assert run.metrics == {"loss": [(step, step / 2) for step in range(0, 100, 10)]}


def _run(code):
    env = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env)
