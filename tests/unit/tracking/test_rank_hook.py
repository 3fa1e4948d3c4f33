"""From the first import of MLflow in a rank: how it is noticed, what is waited for, and what a rank pays for it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests.support.mlflow_stores import read_runs, sqlite_store
from tests.support.tracked_rank import RankError, TrackedLaunch

_SOON = "from air_nb.tracking import rank_run; rank_run._WAIT_S = 0.3"


@pytest.fixture
def launch(tmp_path):
    launch = TrackedLaunch(tmp_path / "run", sqlite_store(tmp_path))
    launch.open()
    return launch


@pytest.fixture
def pending(tmp_path):
    return TrackedLaunch(tmp_path / "run", sqlite_store(tmp_path))


def test_installing_the_hook_loads_neither_mlflow_nor_what_works_with_it(launch):
    code = """
        import sys
        from pathlib import Path
        before = set(sys.modules)
        from air_nb.tracking import rank_hook
        rank_hook.install(Path("/nowhere"), 0)
        import json, decimal, email.message
        print(*sorted(name for name in set(sys.modules) - before if "mlflow" in name or name.startswith("air_nb.")))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)

    assert set(done.stdout.split()) <= {
        *("air_nb.decorator", "air_nb.errors", "air_nb.magics", "air_nb.options", "air_nb.protocol"),
        *("air_nb.runtime", "air_nb.topology", "air_nb.protocol.tracking"),
        *("air_nb.tracking", "air_nb.tracking.rank_hook", "air_nb.tracking.plain", "air_nb.tracking.spool"),
    }


@pytest.mark.parametrize(
    "statement",
    [
        "import mlflow",
        "import mlflow.pytorch",
        "from mlflow import MlflowClient",
        "from mlflow.tracking import fluent",
        "import importlib; importlib.import_module('mlflow')",
        "import helper",  # a module of the user's that imports it
    ],
)
def test_every_way_to_import_mlflow_ends_in_the_launchs_run(launch, statement):
    (launch.directory / "helper.py").write_text("import mlflow\n")
    with launch.rank() as rank:
        seen = rank.run(f"{statement}\nimport mlflow, os\nmlflow.active_run().info.run_id")
        rank.run("mlflow.log_metric('loss', 0.5, step=3)")
        environ = rank.run("[os.environ[n] for n in ('MLFLOW_RUN_ID', 'MLFLOW_EXPERIMENT_ID', 'MLFLOW_TRACKING_URI')]")

        assert seen == launch.tracked.mlflow_run_id
        assert environ == [seen, launch.tracked.experiment_id, launch.uri]
        assert [entry.metrics[0][::3] for entry in launch.spooled()] == [("loss", 3)]
        assert rank.end() == 0
    assert [(run.run_id, run.status) for run in read_runs(launch.uri)] == [(seen, "RUNNING")]


def test_two_threads_that_import_it_at_once_both_log_into_the_run(launch):
    code = """
        import threading
        def work(name):
            import mlflow
            mlflow.log_metric(name, 1.0)
            runs.append(mlflow.active_run().info.run_id)
        runs = []
        threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b", "c")]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        runs
    """
    with launch.rank() as rank:
        runs = rank.run(textwrap.dedent(code))

    assert runs == [launch.tracked.mlflow_run_id] * 3
    assert sorted(entry.metrics[0][0] for entry in launch.spooled()) == ["a", "b", "c"]


def test_looking_for_mlflow_is_not_importing_it(launch):
    with launch.rank() as rank:
        found = rank.run("import importlib.util, sys; bool(importlib.util.find_spec('mlflow'))")
        imported = rank.run("'mlflow' in sys.modules or 'air_nb.tracking.rank_run' in sys.modules")

    assert (found, imported) == (True, False)


def test_mlflow_sees_its_own_loader_and_the_hook_is_gone(launch):
    code = """
        import inspect, importlib.resources, mlflow, sys
        from air_nb.tracking import rank_hook
        [
            type(mlflow.__spec__.loader).__name__,
            "exec_module" in vars(mlflow.__spec__.loader),
            "import" in inspect.getsource(mlflow),
            importlib.resources.files("mlflow").joinpath("__init__.py").is_file(),
            any(type(finder).__module__ == rank_hook.__name__ for finder in sys.meta_path),
        ]
    """
    with launch.rank() as rank:
        assert rank.run(textwrap.dedent(code)) == ["SourceFileLoader", False, True, True, False]


def test_without_mlflow_the_users_own_import_error_is_raised(launch):
    hide = "sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ == '_Finder']; sys.path.clear()"
    with launch.rank() as rank, pytest.raises(RankError, match="ModuleNotFoundError: No module named 'mlflow'"):
        rank.run(f"import sys; {hide}\nimport mlflow")


@pytest.mark.parametrize("layout", ["package", "directory"])
def test_something_else_that_is_called_mlflow_is_left_alone(launch, layout):
    (launch.directory / "mlflow").mkdir()
    (launch.directory / "mlflow" / ("__init__.py" if layout == "package" else "data.txt")).write_text("x = 1")
    hide = "" if layout == "package" else "; sys.path[:] = ['.']"
    with launch.rank() as rank:
        rank.run(f"import sys; sys.path.insert(0, '.'){hide}\nimport mlflow")
        assert rank.run("hasattr(mlflow, 'log_metric')") is False
        assert "air_nb" not in rank.stderr


def test_the_import_waits_until_the_run_is_there(pending):
    code = """
        from air_nb.tracking import rank_run
        plain = rank_run.RankRun.await_open
        def await_open(run):
            (run.directory / "asked").touch()
            plain(run)
        rank_run.RankRun.await_open, rank_run._WAIT_S = await_open, 60
        import mlflow
        mlflow.active_run().info.run_id
    """

    def open_when_asked():
        while not (pending.directory / "asked").exists():
            time.sleep(0.01)
        pending.open()

    opener = threading.Thread(target=open_when_asked)
    opener.start()
    with pending.rank() as rank:
        seen = rank.run(textwrap.dedent(code))
    opener.join()

    assert seen == pending.tracked.mlflow_run_id


def test_a_rank_goes_on_without_the_run_after_the_wait(pending):
    with pending.rank() as rank:
        rank.run(f"{_SOON}\nimport mlflow, os")
        rank.run("mlflow.log_metric('loss', 0.5); mlflow.log_param('lr', 1); mlflow.set_tag('a', 'b')")

        assert len(pending.spooled()) == 3
        assert rank.run("'MLFLOW_RUN_ID' in os.environ") is False
        assert len(rank.run("mlflow.active_run().info.run_id")) == 32


def test_a_problem_is_not_waited_for(pending):
    pending.write(problem="The store is not there.")
    with pending.rank() as rank:
        rank.run(
            "from air_nb.tracking import rank_run; rank_run._WAIT_S = 600\nimport mlflow\nmlflow.log_metric('a', 1)"
        )

    assert len(pending.spooled()) == 1


def test_an_interrupt_ends_the_wait_and_the_next_import_is_as_good_as_the_first(pending):
    code = """
        import os, signal, sys, threading, time
        from air_nb.tracking import rank_run
        rank_run._WAIT_S = 600
        def strike():
            while "air_nb.tracking.rank_fluent" not in sys.modules:
                time.sleep(0.02)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=strike).start()
        import mlflow
    """
    with pending.rank() as rank:
        with pytest.raises(RankError, match="KeyboardInterrupt"):
            rank.run(textwrap.dedent(code))
        pending.open()
        rank.run("import mlflow\nmlflow.log_metric('late', 1)")

        assert rank.run("mlflow.active_run().info.run_id") == pending.tracked.mlflow_run_id
    assert [entry.metrics[0][0] for entry in pending.spooled()] == ["late"]


def test_a_version_of_mlflow_that_the_hook_does_not_know_is_said_and_works_plainly(launch):
    (launch.directory / "tracking.json").write_text("{}")
    with launch.rank() as rank:
        rank.run("import mlflow")
        assert "could not prepare MLflow" in rank.stderr
        assert rank.run("mlflow.active_run()") is None


def test_another_store_chosen_in_the_cell_before_the_import_is_refused_at_once(launch):
    with launch.rank() as rank, pytest.raises(RankError, match=r"before the cell") as refused:
        rank.run("import os; os.environ['MLFLOW_TRACKING_URI'] = 'http://elsewhere:5000'\nimport mlflow")
    assert "http://elsewhere:5000" in str(refused.value)


def test_a_child_of_a_rank_that_logs_finds_the_run_in_its_environment(launch):
    code = """
        import subprocess, mlflow
        subprocess.run(["printenv", "MLFLOW_RUN_ID"], capture_output=True, text=True).stdout.strip()
    """
    with launch.rank() as rank:
        assert rank.run(textwrap.dedent(code)) == launch.tracked.mlflow_run_id


def test_a_forked_child_logs_into_the_run_through_the_same_spool(launch):
    code = """
        import multiprocessing, mlflow
        mlflow.log_metric("parent", 1)
        def work(): mlflow.log_metric("child", 1)
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start(); child.join()
        child.exitcode
    """
    with launch.rank() as rank:
        assert rank.run(textwrap.dedent(code)) == 0
    assert [entry.metrics[0][0] for entry in launch.spooled()] == ["parent", "child"]
    assert [run.status for run in read_runs(launch.uri)] == ["RUNNING"]


def test_several_ranks_that_log_at_once_lose_nothing(launch):
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(launch.rank(number)) for number in range(3)]
        for rank in ranks:
            rank.run("import mlflow\nfor step in range(200): mlflow.log_metric('loss', step, step=step)")
    for number in range(3):
        assert [entry.metrics[0][3] for entry in launch.spooled(number)] == list(range(200))


def test_a_rank_that_only_logs_opens_no_store(launch):
    code = """
        import sys, mlflow
        with mlflow.start_run(run_name="x"):
            mlflow.log_metric("a", 1)
            mlflow.log_params({"b": 2})
        mlflow.end_run()
        "mlflow.store.tracking.sqlalchemy_store" in sys.modules
    """
    with launch.rank() as rank:
        assert rank.run(textwrap.dedent(code)) is False
        assert rank.end() == 0
