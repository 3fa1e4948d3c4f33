"""What is known of a run besides what it logs: tags, the state of its git repository, how it ended.

Pure but for ``git_state``, which asks git.
"""

from __future__ import annotations

import getpass
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from air_nb.protocol.messages import RunState
from air_nb.protocol.tracking import TrackingRequest
from air_nb.runs.directory import RunRecord

__all__ = ["RUN_ID_TAG", "Ending", "GitState", "ending", "git_state", "git_values", "opening_tags"]

RUN_ID_TAG = "air_nb.run_id"

_MAX_TAG_CHARACTERS = 5000  # MLflow's own limit of old; newer ones take 8,000
_GIT_TIMEOUT_S = 2.0
_STATUS = {RunState.FINISHED: "FINISHED", RunState.FAILED: "FAILED"}


@dataclass(frozen=True, slots=True)
class GitState:
    """The repository that a run was launched in.

    Attributes:
        commit: Full hash of HEAD.
        dirty: Whether something tracked differs from it; None if git took too long to say.
    """

    commit: str
    dirty: bool | None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run is closed in MLflow.

    Attributes:
        status: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``.
        ended_ms: When, in ms since the epoch; None for now.
        tags: Why.
    """

    status: str
    ended_ms: int | None
    tags: dict[str, str]


def opening_tags(request: TrackingRequest, record: RunRecord) -> dict[str, str]:
    """Tags that a new run is made with; those of MLflow as it would set them itself."""
    tags = {RUN_ID_TAG: record.run_id, "mlflow.source.type": "LOCAL"}
    with suppress(OSError, KeyError, ImportError):  # a user id without a name, as in many containers
        tags["mlflow.user"] = os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    if request.source_name:
        tags["mlflow.source.name"] = request.source_name
    if request.parent_run_id:
        tags["mlflow.parentRunId"] = request.parent_run_id
    return tags


def git_state(directory: str) -> GitState | None:
    """Ask git; None if there is no repository, no commit, no git, or no answer in two seconds."""
    commit = _git(directory, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return GitState(commit, None if changes is None else bool(changes))


def _git(directory: str, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", directory, *arguments],  # noqa: S607 - the user's git, as found on their path
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
            text=True,
            errors="replace",
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def git_values(state: GitState | None) -> tuple[dict[str, str], dict[str, str]]:
    """Parameters and tags that say it."""
    if state is None:
        return {}, {}
    dirty = "unknown" if state.dirty is None else str(state.dirty).lower()
    params = {"air_nb.git_commit": state.commit, "air_nb.git_dirty": dirty}
    return params, {"mlflow.source.git.commit": state.commit}


def ending(record: RunRecord) -> Ending:
    """How MLflow is to see the end of a run; one whose record is not final was killed with its kernel."""
    ended_ms = None if record.ended_at is None else int(record.ended_at * 1000)
    if not record.state.is_final:
        return Ending("KILLED", ended_ms, {"air_nb.reason": "the kernel ended"})
    status = _STATUS.get(record.state, "KILLED")
    if status == "FINISHED":
        return Ending(status, ended_ms, {})
    if status == "FAILED":
        return Ending(status, ended_ms, _failure_tags(record))
    reason = record.reason or record.state.lower().replace("_", " ")
    return Ending(status, ended_ms, {"air_nb.reason": _tag_text(reason)})


def _failure_tags(record: RunRecord) -> dict[str, str]:
    if not record.failures:
        return {"air_nb.failure": _tag_text(record.reason or "unknown")}
    first: dict[str, Any] = record.failures[0]
    text = ": ".join(part for part in (first.get("type_name"), first.get("message")) if part)
    return {"air_nb.failure": _tag_text(text or "unknown"), "air_nb.failing_rank": str(first.get("rank"))}


def _tag_text(text: str) -> str:
    return text if len(text) <= _MAX_TAG_CHARACTERS else f"{text[: _MAX_TAG_CHARACTERS - 1]}…"
