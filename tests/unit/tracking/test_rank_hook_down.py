"""A server that is not there: a rank's logging goes on, nothing raises, nothing waits twice, and copies are kept."""

from __future__ import annotations

import textwrap

import pytest

from air_nb.protocol.tracking import TrackedState
from tests.support.mlflow_servers import silent_server
from tests.support.mlflow_stores import read_runs, sqlite_store
from tests.support.tracked_rank import EXPERIMENT, TrackedLaunch

_ONCE = "from air_nb.tracking import rank_run; rank_run._WAIT_S = 0.2"


@pytest.fixture(scope="module")
def server():
    with silent_server() as server:
        yield server


@pytest.fixture(scope="module")
def process(server, tmp_path_factory):
    launch = TrackedLaunch(tmp_path_factory.mktemp("launch") / "run", server.uri)
    with launch.rank(MLFLOW_HTTP_REQUEST_TIMEOUT="600", MLFLOW_HTTP_REQUEST_MAX_RETRIES="10") as rank:
        rank.run(f"{_ONCE}\nimport mlflow\nfrom mlflow import MlflowClient\nfrom mlflow.tracking import fluent")
        yield launch, rank


@pytest.fixture
def launch(process):
    process[0].spooled()
    return process[0]


@pytest.fixture
def run(process, launch, server):
    """Runs code in a rank whose server is silent; it must not even be asked: that would take 600 s."""
    yield lambda code: process[1].run(textwrap.dedent(code))
    assert server.connections == 0


def test_all_logging_is_kept(run, launch):
    run("""
        with mlflow.start_run(run_name="mine", tags={"a": 1}) as active:
            mlflow.log_metric("m", 1)
            mlflow.log_params({"p": 1})
            mlflow.set_tag("t", 1)
        MlflowClient().log_metric(active.info.run_id, "late", 2)
        mlflow.end_run()
        mlflow.flush_async_logging()
    """)

    entries = launch.spooled()
    assert [m[0] for entry in entries for m in entry.metrics] == ["m", "late"]
    assert [p for entry in entries for p in entry.params] == [("p", "1")]
    assert [t for entry in entries for t in entry.tags] == [("a", "1"), ("t", "1")]
    assert [entry.run_name for entry in entries if entry.run_name] == ["mine"]


def test_artifacts_are_copied_and_the_copy_is_spooled(run, process, launch):
    run("""
        import pathlib
        pathlib.Path("out/deep").mkdir(parents=True, exist_ok=True)
        pathlib.Path("out/deep/x.txt").write_text("x")
        pathlib.Path("y.txt").write_text("y")
        mlflow.log_artifact("y.txt")
        mlflow.log_artifact("y.txt", "sub")
        mlflow.log_artifact("out", "sub")
        mlflow.log_artifacts("out")
        mlflow.log_artifacts("out", "other")
        mlflow.log_text("hello", "notes/hello.txt")
        pathlib.Path("y.txt").write_text("changed")
    """)

    sent = {}
    for entry in launch.spooled():
        path, artifact_path = entry.artifact
        source = launch.directory / path
        files = [source] if source.is_file() else [file for file in source.rglob("*") if file.is_file()]
        for file in files:
            name = file.name if source.is_file() else str(file.relative_to(source))
            sent["/".join(part for part in (artifact_path, name) if part)] = file.read_text()
    assert sent == {
        "y.txt": "y",
        "sub/y.txt": "y",
        "sub/out/deep/x.txt": "x",
        "deep/x.txt": "x",
        "other/deep/x.txt": "x",
        "notes/hello.txt": "hello",
    }
    assert process[1].stderr == ""


def test_figures_tables_and_images_are_kept_too(run, launch):
    run("""
        import matplotlib; matplotlib.use("agg")
        import matplotlib.pyplot as plt, numpy
        figure, _ = plt.subplots()
        mlflow.log_figure(figure, "plot.png")
        mlflow.log_table({"a": [1, 2]}, "table.json")
        mlflow.log_image(numpy.zeros((4, 4, 3), dtype=numpy.uint8), "black.png")
        mlflow.log_image(numpy.zeros((4, 4, 3), dtype=numpy.uint8), key="black", step=3)
    """)

    entries = [entry for entry in launch.spooled() if entry.artifact is not None]
    kept = [launch.directory / entry.artifact[0] for entry in entries]
    assert [path.name for path in kept][:3] == ["plot.png", "table.json", "black.png"]
    assert len(kept) == 5  # the last one with its preview
    assert all(path.stat().st_size > 0 for path in kept)


def test_loggers_find_what_they_ask_for(run, launch):
    found = run(f"""
        client = MlflowClient()
        experiment = client.get_experiment_by_name("lightning_logs")
        made = client.create_experiment("lightning_logs", artifact_location=None)
        started = client.create_run(made, tags={{"a": "b"}})
        client.set_terminated(started.info.run_id)
        [
            experiment,
            client.get_experiment(made).lifecycle_stage,
            mlflow.set_experiment({EXPERIMENT!r}).name,
            mlflow.search_experiments(filter_string="name = 'x'"),
            client.get_run(started.info.run_id).info.status,
            client.get_run(started.info.run_id).info.run_id == mlflow.active_run().info.run_id,
            mlflow.active_run().info.artifact_uri,
        ]
    """)
    assert found == [None, "active", EXPERIMENT, [], "RUNNING", True, None]


def test_a_nested_run_is_lost_and_says_so_but_does_not_fail(run, process, launch):
    run("""
        for rate in (0.1, 0.2):
            with mlflow.start_run(nested=True, run_name="kid"):
                mlflow.log_param("rate", rate)
                mlflow.log_metric("childs", 1)
                mlflow.log_input(mlflow.data.from_numpy(__import__("numpy").zeros(2)))
        mlflow.log_metric("parents", 1)
    """)

    assert [m[0] for entry in launch.spooled() for m in entry.metrics] == ["parents"]
    assert process[1].stderr.count("the nested run kid could not be made") == 1


def test_inputs_are_dropped(run, launch):
    run("mlflow.log_input(mlflow.data.from_numpy(__import__('numpy').zeros(2)))")
    assert launch.spooled() == []


def test_ids_that_were_handed_out_are_good_when_the_server_is_back(tmp_path):
    launch = TrackedLaunch(tmp_path / "run", sqlite_store(tmp_path))
    launch.write(problem="The store is not there.")
    with launch.rank() as rank:
        rank.run("import mlflow, os\nfrom mlflow import MlflowClient\nearly = mlflow.active_run().info.run_id")
        launch.open()
        launch.write(problem=None, sent=[1 << 40])
        rank.run("MlflowClient().log_metric(early, 'a', 1)\nmlflow.log_text('x', 'x.txt')")
        ids = rank.run(
            "[mlflow.get_run(early).info.run_id, mlflow.active_run().info.run_id, os.environ['MLFLOW_RUN_ID']]"
        )
        rank.run("MlflowClient().log_artifact(early, 'tracking.json')")
        rank.run("with mlflow.start_run(nested=True) as child: mlflow.log_metric('b', 1)")

    ours = str(launch.tracked.mlflow_run_id)
    assert ids == [ours] * 3
    stored = {run.run_id: run for run in read_runs(launch.uri)}
    assert set(stored[ours].artifacts) == {"x.txt", "tracking.json"}
    assert [run.parent for run in stored.values() if run.run_id != ours] == [ours]


def test_a_server_that_dies_meanwhile_ends_no_training(tmp_path):
    with silent_server() as server:
        launch = TrackedLaunch(tmp_path / "run", server.uri)
        launch.write(state=TrackedState.OPEN, mlflow_run_id="a" * 32, experiment_id="7", experiment_name=EXPERIMENT)
        with launch.rank(MLFLOW_HTTP_REQUEST_TIMEOUT="1", MLFLOW_HTTP_REQUEST_MAX_RETRIES="0") as rank:
            rank.run("import mlflow")
            rank.run("mlflow.log_metric('a', 1)\nmlflow.log_text('x', 'x.txt')\nmlflow.get_experiment('7')")
            said = rank.stderr

    kept = [entry.artifact for entry in launch.spooled() if entry.artifact is not None]
    assert [path.rpartition("/")[2] for path, _ in kept] == ["x.txt"]
    assert server.uri in said
    assert "does not answer" in said
