"""A process that stands for one rank of a tracked launch: the hook installed, nothing else of air_nb running.

The test is the tracking process: it writes ``mlflow.json`` and reads the spool.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from air_nb.protocol.tracking import REQUEST_FILE, TRACKED_FILE, TrackedRun, TrackedState, TrackingRequest, spool_name
from air_nb.tracking import spool
from air_nb.tracking.spool import SpoolEntry
from tests.support.mlflow_stores import sqlite_path

__all__ = ["EXPERIMENT", "RankError", "TrackedLaunch", "TrackedRank"]

EXPERIMENT = "digits"
_LOOP = """
import ast, json, os, sys, traceback
from pathlib import Path
from air_nb.tracking import rank_hook
rank_hook.install(Path(sys.argv[1]), int(sys.argv[2]))
answers, sys.stdout, names = sys.stdout, sys.stderr, {"__name__": "__main__"}
for line in sys.stdin:
    body = ast.parse(json.loads(line)).body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    try:
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        answer = {"value": eval(compile(last, "cell", "eval"), names) if last else None}
        text = json.dumps(answer, default=str)
    except BaseException as error:
        text = json.dumps({"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()})
    print(text, file=answers, flush=True)
"""


class RankError(Exception):
    """What the code raised there, as its type's name and its text."""


class TrackedLaunch:
    """A run directory, as kernel and tracking process leave it.

    Args:
        directory: Made if it isn't there.
        uri: Tracking URI.
    """

    def __init__(self, directory: Path, uri: str) -> None:
        self.directory = directory
        self.uri = uri
        directory.mkdir(parents=True, exist_ok=True)
        request = TrackingRequest("brave-otter", uri, experiment_name=EXPERIMENT)
        (directory / REQUEST_FILE).write_text(request.encode())
        self.tracked = TrackedRun(TrackedState.PENDING, uri)
        self._read = {0: 0}

    def open(self) -> None:
        """The run is there: the tracking process has made it."""
        run_id, experiment_id = uuid.uuid4().hex, _add_experiment(self.uri)
        _add_run(self.uri, run_id, experiment_id)
        self.write(
            state=TrackedState.OPEN, mlflow_run_id=run_id, experiment_id=experiment_id, experiment_name=EXPERIMENT
        )

    def write(self, **changes: Any) -> None:
        """Say so in ``mlflow.json``."""
        self.tracked = replace(self.tracked, **changes)
        new = self.directory / f"{uuid.uuid4().hex}.tmp"
        new.write_text(self.tracked.encode())
        new.rename(self.directory / TRACKED_FILE)

    def spooled(self, rank: int = 0) -> list[SpoolEntry]:
        """What has been logged since the last call."""
        part = spool.read(self.directory / spool_name(rank), self._read.get(rank, 0), 1 << 24)
        assert part.skipped == 0
        self._read[rank] = part.offset
        return part.entries

    @contextmanager
    def rank(self, rank: int = 0, **env: str) -> Iterator[TrackedRank]:
        """Start a rank; its standard error goes to a file of the run directory."""
        with (self.directory / f"rank_{rank}.err").open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", _LOOP, str(self.directory), str(rank)],
                env=os.environ | {"MLFLOW_TRACKING_URI": self.uri, "MLFLOW_DISABLE_TELEMETRY": "true"} | env,
                cwd=self.directory,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            yield TrackedRank(process, self.directory / f"rank_{rank}.err")
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()


class TrackedRank:
    """Handle of a rank's process."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self._errors = errors

    def run(self, code: str) -> Any:
        """Run code; returns the value of its last expression, through JSON.

        Raises:
            RankError: The code raised.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the rank died:\n{self._errors.read_text()}"
        answer = json.loads(line)
        if "error" in answer:
            raise RankError(f"{answer['error']}: {answer['message']}\n{answer['trace']}")
        return answer["value"]

    def end(self) -> int:
        """Let it end by itself; returns its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=60)

    @property
    def stderr(self) -> str:
        """What it has written there."""
        return self._errors.read_text()


def _add_experiment(uri: str) -> str:
    path = sqlite_path(uri)
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            "INSERT OR IGNORE INTO experiments (name, artifact_location, lifecycle_stage, creation_time)"
            " VALUES (?, ?, 'active', 1)",
            (EXPERIMENT, str(path.parent / "mlruns" / "1")),
        )
        database.commit()
        (experiment_id,) = database.execute(
            "SELECT experiment_id FROM experiments WHERE name = ?", (EXPERIMENT,)
        ).fetchone()
        return str(experiment_id)


def _add_run(uri: str, run_id: str, experiment_id: str) -> None:
    path = sqlite_path(uri)
    artifacts = str(path.parent / "mlruns" / "1" / run_id / "artifacts")
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            "INSERT INTO runs (run_uuid, name, status, start_time, lifecycle_stage, artifact_uri, experiment_id,"
            " user_id, source_type) VALUES (?, 'brave-otter', 'RUNNING', ?, 'active', ?, ?, 'me', 'LOCAL')",
            (run_id, int(time.time() * 1000), artifacts, experiment_id),
        )
        database.commit()
