"""MLflow's functions in a rank mean the launch's run: what does, what makes a child, and what is refused at once."""

from __future__ import annotations

import math
import textwrap
import threading

import pytest

from air_nb.protocol.tracking import spool_name
from tests.support.mlflow_stores import read_runs, sqlite_store
from tests.support.tracked_rank import EXPERIMENT, RankError, TrackedLaunch


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    directory = tmp_path_factory.mktemp("launch")
    launch = TrackedLaunch(directory / "run", sqlite_store(directory))
    launch.open()
    return launch


@pytest.fixture(scope="module")
def process(launch):
    with launch.rank() as rank:
        rank.run("import mlflow, threading\nfrom mlflow import MlflowClient\nfrom mlflow.tracking import fluent")
        yield rank


@pytest.fixture
def run(process, launch):
    """Runs code in the rank, which begins each test as at the import."""
    process.run("fluent._active_run_stack.reset()")
    launch.spooled()
    return lambda code: process.run(textwrap.dedent(code))


@pytest.fixture
def ours(launch):
    return launch.tracked.mlflow_run_id


def metrics(launch):
    return [key for entry in launch.spooled() for key, *_ in entry.metrics]


# ------------------------------------------------------------------------------------------------------ what is logged


def test_all_ways_to_log_reach_the_spool(run, launch):
    run("""
        mlflow.log_metric("a", 1.5, step=7, timestamp=1_700_000_000_000)
        mlflow.log_metrics({"b": 2, "c": 3}, step=8)
        mlflow.log_metrics({"d": 4}, step=9, synchronous=False).wait()
        mlflow.log_metric("e", 5, synchronous=False).wait()
        mlflow.log_param("p", 1)
        mlflow.log_params({"q": 2, "r": None}, synchronous=False).wait()
        mlflow.set_tag("s", 3)
        mlflow.set_tags({"t": 4})
        client = MlflowClient()
        run_id = mlflow.active_run().info.run_id
        client.log_metric(run_id, "f", 6)
        client.log_param(run_id, "u", 7)
        client.set_tag(run_id, "v", 8, synchronous=False).wait()
        from mlflow.entities import Metric, RunTag
        client.log_batch(run_id, metrics=[Metric("g", 7, 1, 0)], tags=[RunTag("w", "9")])
    """)

    entries = launch.spooled()
    assert [m[0] for entry in entries for m in entry.metrics] == list("abcdefg")
    assert entries[0].metrics == (("a", 1.5, 1_700_000_000_000, 7),)
    assert [p for entry in entries for p in entry.params] == [("p", "1"), ("q", "2"), ("r", "None"), ("u", "7")]
    assert [t for entry in entries for t in entry.tags] == [("s", "3"), ("t", "4"), ("v", "8"), ("w", "9")]


def test_values_of_numpy_and_torch_and_no_numbers_at_all_are_as_in_mlflow(run, launch):
    run("""
        import numpy, torch
        mlflow.log_metric("a", numpy.float32(0.5), step=numpy.int64(3))
        mlflow.log_metric("b", torch.tensor(0.25), step=4)
        mlflow.log_metrics({"c": float("nan"), "d": float("inf")})
    """)

    values = [m for entry in launch.spooled() for m in entry.metrics]
    assert [(m[1], m[3]) for m in values[:2]] == [(0.5, 3), (0.25, 4)]
    assert math.isnan(values[2][1])
    assert values[3][1] == math.inf


@pytest.mark.parametrize(
    "code, said",
    [
        ("mlflow.log_metric('a', 'much')", "could not convert|valid double"),
        ("mlflow.log_metric('a' * 300, 1)", "exceeds the maximum length"),
        ("mlflow.log_metric('a$b', 1)", "alphanumerics"),
        ("mlflow.log_metric('a', 1, step='x')", "valid long"),
        ("mlflow.log_param('../a', 1)", "Invalid value"),
        ("mlflow.set_tag('', 1)", "Invalid value"),
    ],
)
def test_what_mlflow_would_refuse_is_refused_at_the_call(run, launch, code, said):
    with pytest.raises(RankError, match=said):
        run(code)
    assert launch.spooled() == []


def test_long_values_are_cut_as_in_mlflow(run, launch):
    run("mlflow.log_param('long', 'x' * 7000)\nmlflow.set_tag('long', 'x' * 9000)")

    param, tag = launch.spooled()
    assert (len(param.params[0][1]), len(tag.tags[0][1])) == (6000, 8000)


def test_a_parameter_with_another_value_raises_as_in_mlflow(run, launch):
    run("mlflow.log_param('lr', 0.1)\nmlflow.log_param('lr', 0.1)")
    with pytest.raises(RankError, match=r"Changing param values is not allowed. Param with key='lr'.*'0\.1'.*'0\.2'"):
        run("mlflow.log_params({'other': 1, 'lr': 0.2})")
    assert {p for entry in launch.spooled() for p in entry.params} == {("lr", "0.1")}


def test_an_artifact_goes_where_mlflow_puts_it(run, launch, ours):
    run("""
        mlflow.log_text("hello", "notes/hello.txt")
        mlflow.log_dict({"a": 1}, "a.json")
    """)

    (stored,) = [each for each in read_runs(launch.uri) if each.run_id == ours]
    assert {"notes/hello.txt", "a.json"} <= set(stored.artifacts)
    assert launch.spooled() == []


def test_an_artifact_that_is_not_there_is_the_callers_mistake(run, launch):
    with pytest.raises(RankError, match="No such file"):
        run("mlflow.log_artifact('/nowhere/at/all.txt')")
    assert launch.spooled() == []


def test_a_dataset_is_an_input_of_the_run(run, ours):
    run("""
        import pandas
        dataset = mlflow.data.from_pandas(pandas.DataFrame({"x": [1, 2]}), name="points")
        mlflow.log_input(dataset, context="training")
    """)
    assert run(f"[i.dataset.name for i in MlflowClient().get_run('{ours}').inputs.dataset_inputs]") == ["points"]


# ----------------------------------------------------------------------------------------------------- runs, in and out


def test_start_run_is_the_launchs_run_which_no_end_ends(run, launch, ours):
    ids = run("""
        with mlflow.start_run() as first:
            mlflow.log_metric("in", 1)
        second = mlflow.start_run(run_id=first.info.run_id)
        mlflow.end_run()
        mlflow.end_run("FAILED")
        after = mlflow.active_run()
        mlflow.log_metric("after", 1)
        runs = [first, second, mlflow.active_run(), mlflow.last_active_run()]
        [after, *(each.info.run_id for each in runs)]
    """)

    assert ids == [None, ours, ours, ours, ours]
    assert metrics(launch) == ["in", "after"]
    assert next(each.status for each in read_runs(launch.uri) if each.run_id == ours) == "RUNNING"


def test_an_error_inside_start_run_is_not_swallowed(run):
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run("with mlflow.start_run(): 1 / 0")


def test_a_loop_that_ends_runs_until_none_is_active_ends(run, ours):
    assert (
        run("""
        with mlflow.start_run():
            while mlflow.active_run() is not None:
                mlflow.end_run()
        mlflow.start_run().info.run_id
    """)
        == ours
    )


def test_blocks_of_the_launchs_run_nest(run, launch):
    run("""
        with mlflow.start_run():
            with mlflow.start_run():
                mlflow.log_metric("inner", 1)
            mlflow.log_metric("outer", 1)
        mlflow.log_metric("after", 1)
    """)
    assert metrics(launch) == ["inner", "outer", "after"]


def test_a_name_tags_and_a_description_are_the_runs(run, launch):
    run("with mlflow.start_run(run_name='renamed', tags={'k': 1}, description='why'): pass")

    entries = launch.spooled()
    assert [entry.run_name for entry in entries if entry.run_name] == ["renamed"]
    assert {t for entry in entries for t in entry.tags} == {("k", "1"), ("mlflow.note.content", "why")}


@pytest.mark.parametrize(
    "how", ["nested=True", "parent_run_id=mlflow.active_run().info.run_id", "nested=True, run_name='kid'"]
)
def test_a_nested_run_is_a_real_child_that_ends(run, launch, ours, how):
    child = run(f"""
        with mlflow.start_run({how}) as child:
            mlflow.log_metric("childs", 1)
            mlflow.log_param("lr", "of the child")
        mlflow.log_metric("parents", 1)
        child.info.run_id
    """)

    assert metrics(launch) == ["parents"]
    stored = next(each for each in read_runs(launch.uri) if each.run_id == child)
    assert (stored.parent, stored.status, stored.experiment) == (ours, "FINISHED", EXPERIMENT)
    assert stored.metrics == {"childs": [(0, 1.0)]}
    assert stored.params == {"lr": "of the child"}


def test_after_end_run_a_nested_run_is_still_a_child_of_the_launchs_run(run, launch, ours):
    child = run("mlflow.end_run()\nwith mlflow.start_run(nested=True) as child: pass\nchild.info.run_id")
    assert next(each.parent for each in read_runs(launch.uri) if each.run_id == child) == ours


def test_a_second_run_inside_a_child_is_refused_as_in_mlflow(run):
    with pytest.raises(RankError, match="already active"):
        run("with mlflow.start_run(nested=True): mlflow.start_run()")


def test_another_thread_is_in_the_launchs_run_too(run, launch, ours):
    ids = run("""
        ids = []
        def work():
            ids.append(mlflow.active_run().info.run_id)
            mlflow.log_metric("thread", 1)
            mlflow.end_run()
            mlflow.log_metric("later", 1)
        thread = threading.Thread(target=work)
        thread.start(); thread.join()
        ids + [mlflow.active_run().info.run_id]
    """)
    assert ids == [ours, ours]
    assert metrics(launch) == ["thread", "later"]


def test_a_logger_that_makes_a_run_of_its_own_gets_the_launchs(run, launch, ours):
    made = run("""
        client = MlflowClient()
        experiment_id = client.create_experiment("lightning_logs")
        tags = {"mlflow.runName": "mine", "mlflow.user": "me", "note": "x"}
        made = client.create_run(experiment_id, tags=tags)
        client.log_metric(made.info.run_id, "a", 1)
        client.set_terminated(made.info.run_id, "FINISHED")
        client.update_run(made.info.run_id, status="FAILED")
        [experiment_id, made.info.run_id]
    """)

    assert made == [launch.tracked.experiment_id, ours]
    entries = launch.spooled()
    assert [entry.run_name for entry in entries if entry.run_name] == ["mine"]
    assert [t for entry in entries for t in entry.tags] == [("note", "x")]
    stored = read_runs(launch.uri)
    assert next(each.status for each in stored if each.run_id == ours) == "RUNNING"
    assert {each.experiment for each in stored} == {EXPERIMENT}


def test_a_client_makes_a_child_when_it_names_a_parent(run, launch, ours):
    made = run(f"""
        tags = {{"mlflow.parentRunId": "{ours}"}}
        MlflowClient().create_run({launch.tracked.experiment_id!r}, tags=tags).info.run_id
    """)
    assert next(each.parent for each in read_runs(launch.uri) if each.run_id == made) == ours


def test_a_client_that_writes_the_stores_address_in_another_way_has_the_same_store(run, launch):
    run(f"""
        import os
        relative = "sqlite:///" + os.path.relpath({launch.uri.removeprefix("sqlite:///")!r})
        MlflowClient(tracking_uri=relative).log_metric(mlflow.active_run().info.run_id, "a", 1)
        mlflow.set_tracking_uri(relative)
    """)
    assert metrics(launch) == ["a"]
    assert run("mlflow.get_tracking_uri()") == launch.uri


def test_a_client_of_another_store_is_left_alone(run, launch, tmp_path):
    other = sqlite_store(tmp_path)
    run(f"client = MlflowClient(tracking_uri={other!r})\nclient.log_metric(client.create_run('0').info.run_id, 'a', 1)")

    assert launch.spooled() == []
    assert [list(each.metrics) for each in read_runs(other)] == [["a"]]


# -------------------------------------------------------------------------------------------------- what is refused


def test_the_launchs_experiment_may_be_set(run, launch):
    assert run(f"mlflow.set_experiment({EXPERIMENT!r}).experiment_id") == launch.tracked.experiment_id
    assert run(f"mlflow.set_experiment(experiment_id={launch.tracked.experiment_id!r}).name") == EXPERIMENT
    run(f"mlflow.start_run(experiment_id={launch.tracked.experiment_id!r})")


@pytest.mark.parametrize(
    "code, way_out",
    [
        ("mlflow.set_experiment('other')", r"'digits'.*'other'.*--experiment NAME"),
        ("mlflow.set_experiment(experiment_id='0')", r"'digits'.*id 0.*--experiment NAME"),
        ("mlflow.start_run(experiment_id='0')", r"'digits'.*id 0.*--experiment NAME"),
        ("mlflow.start_run(experiment_id=0)", r"'digits'.*id 0.*--experiment NAME"),
        ("mlflow.start_run(run_id='0' * 32)", r"MLFLOW_RUN_ID.*nested=True"),
        ("mlflow.set_tracking_uri('http://elsewhere')", r"'http://elsewhere'.*before the cell"),
        ("import pathlib; mlflow.set_tracking_uri(pathlib.Path('elsewhere'))", r"elsewhere'.*before the cell"),
    ],
)
def test_what_would_lead_elsewhere_is_refused_at_once_with_the_way_out(run, launch, code, way_out):
    with pytest.raises(RankError, match=f"MlflowException.*{way_out}") as refused:
        run(code)
    assert len(str(refused.value).partition("\n")[0]) < 400
    run("mlflow.log_metric('still', 1)")
    assert metrics(launch) == ["still"]


# ---------------------------------------------------------------------------------------------------- reading back


def test_reading_the_run_waits_until_what_was_logged_has_been_sent(run, launch, ours):
    launch.write(sent=[0])
    run("mlflow.log_metric('a', 1)")
    size = (launch.directory / spool_name(0)).stat().st_size
    sender = threading.Timer(0.5, lambda: launch.write(sent=[size]))
    sender.start()

    for question in (
        f"mlflow.get_run('{ours}')",
        "mlflow.search_runs(output_format='list')",
        f"MlflowClient().get_metric_history('{ours}', 'a')",
    ):
        sent = run(f"{question}\nimport json, pathlib\njson.loads(pathlib.Path('mlflow.json').read_text())['sent']")
        assert sent == [size], question
    sender.join()


def test_reading_the_run_does_not_wait_for_a_store_with_a_problem(run, launch, ours):
    launch.write(sent=[0], problem="The store is not there.")
    run("from air_nb.tracking import rank_run; rank_run._WAIT_S = 600")
    assert run(f"mlflow.log_metric('a', 1)\nmlflow.get_run('{ours}').info.run_id") == ours
    launch.write(problem=None)
    run("rank_run._WAIT_S = 5.0")


def test_the_artifact_uri_is_that_of_the_store(run, ours):
    assert run("mlflow.get_artifact_uri()").endswith(f"{ours}/artifacts")
    assert run("mlflow.active_run().info.artifact_uri").endswith(f"{ours}/artifacts")


def test_a_tag_that_was_logged_can_be_deleted(run, launch, ours):
    launch.write(problem=None, sent=[1 << 40])
    with pytest.raises(RankError, match="No tag with name"):
        run("mlflow.delete_tag('never-sent')")


def test_stores_are_still_of_mlflows_classes(run):
    assert run("""
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
        from mlflow.store.tracking.rest_store import RestStore
        store = fluent._get_store()
        [isinstance(store, SqlAlchemyStore), isinstance(store, RestStore)]
    """) == [True, False]


def test_a_run_object_can_be_sent_to_the_kernel(run, ours):
    text = run("import pickle, copy; pickle.dumps(copy.deepcopy(mlflow.active_run()).info).hex()")
    assert ours.encode() in bytes.fromhex(text)
    assert b"air_nb" not in bytes.fromhex(text)
