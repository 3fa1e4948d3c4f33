"""What the kernel writes into the directory of a new run, and the environment of its ranks.

The same for a cell, a function, and a run that is launched again from a checkpoint.
"""

from __future__ import annotations

import platform
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from air_nb.errors import LauncherError
from air_nb.protocol.messages import PROTOCOL_VERSION, RunState
from air_nb.protocol.task import TASK_FILE, RankTask
from air_nb.runs.checkpoints import RESUME_VARIABLE
from air_nb.runs.directory import RunDirectory, RunRecord
from air_nb.runs.liveness import ProcessId
from air_nb.runs.paths import home_path
from air_nb.session.kernel_state import rank_environment
from air_nb.session.outcome import interruption

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from air_nb.session.tracked import Tracked
    from air_nb.topology import Topology

__all__ = [
    "close_record",
    "environment_of",
    "remembered_env",
    "unwritable_is_explained",
    "write_first_record",
    "write_task",
]

# `--env` of the runs of this process, by run: the values are on no disk, so nobody else can launch such a run again.
_env_by_run: dict[str, Mapping[str, str]] = {}


def environment_of(
    directory: RunDirectory,
    name: str,
    topology: Topology,
    tracked: Tracked | None,
    *,
    resume: str | None,
    extra: Mapping[str, str],
) -> tuple[dict[str, str], int]:
    """The environment of the ranks but for torchrun's variables, and the CPU threads of each.

    Args:
        directory: The run.
        name: Its name.
        topology: Its ranks.
        tracked: Its MLflow run, if it has one.
        resume: What a ``CheckpointManager`` restores; None leaves it to the code.
        extra: ``--env``; wins over everything else.
    """
    variables = tracked.rank_variables() if tracked is not None else {}
    if resume is not None:
        variables[RESUME_VARIABLE] = resume
    given = {variable: value for variable, value in variables.items() if value is not None} | dict(extra)
    env, threads = rank_environment(topology, given, directory, name)
    for variable in variables.keys() - given.keys():
        env.pop(variable, None)
    if extra:
        _env_by_run[directory.run_id] = dict(extra)
    return env, threads


def remembered_env(record: RunRecord) -> Mapping[str, str] | None:
    """``--env`` of a run; None if another process has launched it and took the values along."""
    if not record.options.get("env"):
        return {}
    return _env_by_run.get(record.run_id)


def write_task(directory: RunDirectory, task: RankTask) -> None:
    """Write ``task.json``, for this user only."""
    (directory.path / TASK_FILE).touch(mode=0o600)
    task.write(directory.path)


def write_first_record(
    directory: RunDirectory,
    name: str,
    topology: Topology,
    options: dict[str, Any],
    notebook: str | None,
    *,
    resumed_from: str | None = None,
) -> None:
    """Write ``run.json``, the last of the files: from now on there is a run."""
    directory.write_record(
        RunRecord(
            run_id=directory.run_id,
            name=name,
            state=RunState.STARTING,
            created_at=time.time(),
            nproc=topology.world_size,
            device=topology.device,
            gpu_uuids=list(topology.gpu_uuids),
            options=options,
            kernel=ProcessId.own(),
            notebook=notebook,
            python=platform.python_version(),
            protocol=PROTOCOL_VERSION,
            resumed_from=resumed_from,
        )
    )


def close_record(directory: RunDirectory, state: RunState, reason: str) -> None:
    """Record how a run ended, unless the launcher has done so: it has died, or it was never told of the run."""
    with suppress(OSError, ValueError):  # a full disk must not hide how the run ended
        if not directory.read_record().state.is_final:
            directory.close_record(state=state, ended_at=time.time(), reason=reason)


@contextmanager
def unwritable_is_explained() -> Iterator[None]:
    """Nothing was started yet: say where the disk is full or the directory is not ours, and what to do."""
    try:
        yield
    except KeyboardInterrupt:  # on a slow disk this takes a while
        raise interruption("the run was still being written, no rank was started") from None
    except OSError as error:
        msg = (
            f"the run can't be written to {home_path()}: {error}. "
            "Make room there, or set AIR_NB_HOME to a directory on another disk; `%air doctor` shows what is free."
        )
        raise LauncherError(msg) from error
