import os
import sys
from types import SimpleNamespace

import pytest

from air_nb.options import RunOptions
from air_nb.session import mlflow_state
from air_nb.session.mlflow_state import FALLBACK_EXPERIMENT, rank_variables, tracking_request, tracking_uri
from air_nb.topology import Topology

CPU = Topology(2, "cpu")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("MLFLOW_") or name == "JPY_SESSION_NAME":
            monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    monkeypatch.chdir(tmp_path)


def request_of(options=None, user_ns=None):
    return tracking_request(options or RunOptions(), "calm-otter-41", CPU, {"lr": 5}, user_ns or {})


def users_mlflow(monkeypatch, *, uri="http://tracking:5000", run=None, registry=None):
    """The module as a kernel has it once the user has imported it."""
    module = SimpleNamespace(
        get_tracking_uri=lambda: uri, active_run=lambda: run, get_registry_uri=lambda: registry or uri
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)


def active_run(run_id="a" * 32, experiment_id="7"):
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id, experiment_id=experiment_id))


def test_the_default_store_is_mlflows_own_database_in_the_working_directory(tmp_path):
    assert tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_store_of_files_that_is_there_already_stays_the_default(tmp_path):
    (tmp_path / "mlruns" / "0").mkdir(parents=True)
    (tmp_path / "mlruns" / "0" / "meta.yaml").touch()
    assert tracking_uri() == (tmp_path / "mlruns").as_uri()


@pytest.mark.parametrize(
    "given,found",
    [
        ("http://host:5000", "http://host:5000"),
        ("databricks", "databricks"),
        ("databricks://profile", "databricks://profile"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("postgresql://user@host/db", "postgresql://user@host/db"),
        ("sqlite:///deep/my.db", "sqlite:///{cwd}/deep/my.db"),
        ("runs here", "file://{cwd}/runs%20here"),
        ("/data/runs", "file:///data/runs"),
    ],
)
def test_a_tracking_uri_means_the_same_from_every_directory(monkeypatch, tmp_path, given, found):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    assert tracking_uri() == found.format(cwd=tmp_path)


def test_what_the_user_told_mlflow_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other:5000")
    users_mlflow(monkeypatch, uri="http://told:5000", registry="http://models:5000")
    request = request_of()
    assert (request.tracking_uri, request.registry_uri) == ("http://told:5000", "http://models:5000")


def test_experiments_are_chosen_in_the_documented_order(monkeypatch):
    def experiment(options=None, user_ns=None):
        request = request_of(options, user_ns)
        return request.experiment_id, request.experiment_name

    assert experiment() == (None, FALLBACK_EXPERIMENT)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/ann/train.py")
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert experiment() == (None, "train")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/ann/package/__main__.py")
    assert experiment() == (None, "package")
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    assert experiment() == (None, FALLBACK_EXPERIMENT)
    assert experiment(user_ns={"__vsc_ipynb_file__": "/home/ann/vs code.ipynb"}) == (None, "vs code")
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/ann/resnet.ipynb")
    assert experiment() == (None, "resnet")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "by name")
    assert experiment() == (None, "by name")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "3")  # what mlflow.set_experiment() leaves behind
    assert experiment() == ("3", None)
    users_mlflow(monkeypatch, run=active_run(experiment_id="7"))
    assert experiment() == ("7", None)
    assert experiment(RunOptions(experiment="asked for")) == (None, "asked for")


def test_a_kernel_is_no_script(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/lib/ipykernel_launcher.py")
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    assert mlflow_state.source_name({}) is None


def test_a_script_that_is_started_from_a_notebook_is_no_notebook(monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/ann/resnet.ipynb")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/ann/train.py")
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert mlflow_state.source_name({}) == "/home/ann/train.py"


def test_the_users_run_id_is_resumed_unless_a_run_is_active(monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "b" * 32)
    assert request_of().resume_run_id == "b" * 32
    users_mlflow(monkeypatch, run=active_run("a" * 32))
    request = request_of()
    assert (request.resume_run_id, request.parent_run_id) == (None, "a" * 32)


def test_parameters_have_a_prefix_and_no_value_of_the_environment():
    request = request_of(RunOptions(env={"TOKEN": "secret"}, timeout_s=60))
    assert all(name.startswith("air_nb.") for name in request.params)
    assert request.params["air_nb.nproc_per_node"] == "2"
    assert request.params["air_nb.env"] == "TOKEN"
    assert "secret" not in request.encode()


def test_ranks_get_the_experiment_by_one_name_only_and_short_timeouts(monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "3")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "9")
    variables = rank_variables(request_of())
    assert (variables["MLFLOW_EXPERIMENT_ID"], variables["MLFLOW_EXPERIMENT_NAME"]) == ("3", None)
    assert variables["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "5"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in variables, "the user's own is kept"


def test_the_kernels_environment_is_not_touched(monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "b" * 32)
    before = dict(os.environ)
    rank_variables(request_of(RunOptions(experiment="other")))
    assert dict(os.environ) == before
