"""The names of MLflow, private ones among them, that the ranks' hook leans on: a new version may have moved them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

_LOOK = """
    import inspect, json
    import mlflow
    from mlflow.entities import RunInfo
    from mlflow.store.tracking.abstract_store import AbstractStore
    from mlflow.tracking import fluent
    from mlflow.tracking._tracking_service import utils
    from mlflow.tracking._tracking_service.client import TrackingServiceClient
    from mlflow.utils import validation
    from air_nb.tracking.rank_store import RankStore

    def takes(function):
        return [name for name in inspect.signature(function).parameters if name != "self"]

    stack = fluent._active_run_stack
    own = [name for name in vars(RankStore) if not name.startswith("_") and hasattr(AbstractStore, name)]
    ours = {name: takes(getattr(RankStore, name)) for name in own}
    theirs = {name: takes(getattr(AbstractStore, name)) for name in own}
    differ = [name for name in own if "args" not in ours[name] and theirs[name][: len(ours[name])] != ours[name]]
    print(json.dumps({
        "stack": callable(stack.default_factory) and stack.get() == [] and stack.set([]) is None,
        "last": fluent._last_active_run_id.get() is None,
        "experiment": fluent._active_experiment_id is None,
        "run id": type(fluent.MLFLOW_RUN_ID).__name__,
        "run id is used": "MLFLOW_RUN_ID.get()" in inspect.getsource(fluent.start_run),
        "lookup by module": "start_run()" in inspect.getsource(fluent._get_or_start_run),
        "registry": "sqlite" in utils._tracking_store_registry._registry,
        "builder": takes(utils._tracking_store_registry.get_store_builder("sqlite:///x.db")),
        "client": {name: takes(getattr(TrackingServiceClient, name))[:3]
                   for name in ("log_artifact", "log_artifacts", "_log_artifact_async", "list_artifacts")},
        "properties": "run_id" in RunInfo._properties(),
        "validation": [hasattr(validation, name) for name in
                       ("_validate_batch_log_data", "_validate_batch_log_limits", "_validate_param_keys_unique")],
        "own": own,
        "differ": differ,
    }))
"""


@pytest.fixture(scope="module")
def seen():
    code = textwrap.dedent(_LOOK)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_the_active_run_is_where_the_hook_puts_it(seen):
    assert seen["stack"]
    assert seen["last"]
    assert seen["experiment"]
    assert seen["run id"] == "_EnvironmentVariable"
    assert seen["run id is used"]
    assert seen["lookup by module"]


def test_the_registry_builds_stores_as_the_hook_expects(seen):
    assert seen["registry"]
    assert seen["builder"] == ["store_uri", "artifact_uri"]


def test_clients_log_artifacts_through_the_methods_that_the_hook_replaces(seen):
    assert seen["client"] == {
        "log_artifact": ["run_id", "local_path", "artifact_path"],
        "log_artifacts": ["run_id", "local_dir", "artifact_path"],
        "_log_artifact_async": ["run_id", "filename", "artifact_path"],
        "list_artifacts": ["run_id", "path"],
    }


def test_the_ranks_store_takes_what_mlflows_stores_take(seen):
    assert seen["properties"]
    assert all(seen["validation"])
    assert {"log_batch", "create_run", "update_run_info", "get_run", "log_metric_async"} <= set(seen["own"])
    assert seen["differ"] == []
