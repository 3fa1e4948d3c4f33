"""MLflow's sqlite stores: made quickly, and read without importing MLflow (3 s, and threads that stay)."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["SERVED_ARTIFACTS", "StoredRun", "read_runs", "sqlite_path", "sqlite_store"]

SERVED_ARTIFACTS = "artifacts"
"""Directory, beside its store, of the artifacts that a server of the tests keeps."""

_SCHEME = "sqlite:///"
_TEMPLATES = Path(__file__).parents[2] / ".pytest_cache" / "mlflow_stores"
_MAKE_SCHEMA = """
import sys
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
SqlAlchemyStore(sys.argv[1], "./mlruns")._dispose_engine()
"""
_PARENT_TAG = "mlflow.parentRunId"


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run, as its store has it.

    Attributes:
        status: ``"RUNNING"``, ``"FINISHED"``, ``"FAILED"``, ``"KILLED"`` or ``"SCHEDULED"``.
        artifact_root: Directory of its artifacts.
        ended_at: Unix time in ms, None while it runs.
        metrics: ``(step, value)`` of every row by key, in the order of step and time.
    """

    run_id: str
    name: str
    status: str
    experiment_id: str
    experiment: str
    artifact_root: Path
    ended_at: int | None
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def parent(self) -> str | None:
        """Id of the run that it is nested under."""
        return self.tags.get(_PARENT_TAG)

    @property
    def artifacts(self) -> dict[str, Path]:
        """Files by their path in the run."""
        root = self.artifact_root
        return {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}


def sqlite_path(uri: str) -> Path:
    """The database of a store."""
    assert uri.startswith(_SCHEME), uri
    return Path(uri.removeprefix(_SCHEME))


def sqlite_store(directory: Path) -> str:
    """Make ``mlflow.db`` in the directory, as MLflow would on first use there, and return its URI.

    The schema takes MLflow seconds, so it is made once and copied.
    """
    path = directory.absolute() / "mlflow.db"
    shutil.copyfile(_template(), path)
    with _connected(path) as database:
        location = str(path.parent / "mlruns" / "0")
        database.execute("UPDATE experiments SET artifact_location = ? WHERE experiment_id = 0", (location,))
        database.commit()
    return f"{_SCHEME}{path}"


def _template() -> Path:
    template = _TEMPLATES / f"{version('mlflow')}.db"
    if not template.exists():
        _TEMPLATES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_TEMPLATES) as directory:
            new = Path(directory) / "mlflow.db"
            subprocess.run([sys.executable, "-c", _MAKE_SCHEMA, f"{_SCHEME}{new}"], check=True, cwd=directory)
            new.replace(template)  # test processes may make it at the same time
    return template


def read_runs(uri: str) -> list[StoredRun]:
    """All runs of a sqlite store that are not deleted, the oldest first; of a server: give its ``store_uri``."""
    path = sqlite_path(uri)
    with _connected(path) as database:
        rows = database.execute(
            "SELECT run_uuid, runs.name, status, runs.experiment_id, experiments.name, artifact_uri, end_time"
            " FROM runs JOIN experiments USING (experiment_id) WHERE runs.lifecycle_stage = 'active'"
            " ORDER BY start_time, runs.rowid"
        ).fetchall()
        return [_read_run(database, path.parent, row) for row in rows]


def _read_run(database: sqlite3.Connection, directory: Path, row: tuple[Any, ...]) -> StoredRun:
    run_id, name, status, experiment_id, experiment, artifact_uri, ended_at = row
    # A server that also keeps the artifacts hands out URIs of a scheme of its own.
    root = artifact_uri.replace("mlflow-artifacts:", f"{directory}/{SERVED_ARTIFACTS}").removeprefix("file://")
    params, tags = (
        dict(database.execute(f"SELECT key, value FROM {table} WHERE run_uuid = ?", (run_id,)))
        for table in ("params", "tags")
    )
    metrics: dict[str, list[tuple[int, float]]] = {}
    query = "SELECT key, step, value FROM metrics WHERE run_uuid = ? ORDER BY step, timestamp"
    for key, step, value in database.execute(query, (run_id,)):
        metrics.setdefault(key, []).append((step, value))
    identity = (run_id, name, status, str(experiment_id), experiment)
    return StoredRun(*identity, Path(root), ended_at or None, params, tags, metrics)


@contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that waits for writers, and never makes a database that is not there."""
    with closing(sqlite3.connect(f"file:{os.fspath(path)}?mode=rw", uri=True, timeout=30)) as database:
        yield database
