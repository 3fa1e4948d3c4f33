"""What ``%air`` answers: status, gpus, runs, logs, stacks, stop. Text in, text out; the magic prints it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from air_nb.launch.stacks import collect_stacks
from air_nb.monitor.holders import Holders
from air_nb.monitor.host import HostSampler
from air_nb.monitor.table import gpu_table
from air_nb.runs.checkpoints import committed_checkpoints, saves_when_stopped
from air_nb.runs.directory import RunDirectory, RunRecord, all_runs, find_run, locate
from air_nb.runs.logs import read_tail
from air_nb.runs.retention import close_dead_runs
from air_nb.runs.text import reason_line
from air_nb.runs.unsent import is_unsent
from air_nb.session.rank_names import name_ranks
from air_nb.session.stacks import describe_stacks

if TYPE_CHECKING:
    from air_nb.session.session import Session

__all__ = ["gpus_text", "logs_text", "runs_text", "stacks_text", "status_text", "stop_run"]

_STOP_WAIT_S = 12.0
_STACKS_WAIT_S = 2.0
_CHECKPOINTS_SHOWN = 5


def gpus_text(session: Session) -> str:
    """The GPUs and who holds them; without a GPU, the machine."""
    report = session.sampler.sample()
    return gpu_table(report, Holders().of(report), HostSampler().sample())


def status_text(session: Session) -> str:
    """The launcher and the live runs of this user."""
    launcher = session.launcher
    if launcher is None or not launcher.is_alive:
        lines = ["launcher: not running; the next run starts it"]
    elif launcher.ready is None:
        lines = [f"launcher: warming up (pid {launcher.pid})"]
    else:
        lines = [f"launcher: warm (pid {launcher.pid}, took {launcher.ready.warm_s:.1f} s)"]
    live = [record for _, record in all_runs() if record.is_live]
    lines += [f"live runs: {len(live) or 'none'}", *(f"  {_line(record)}" for record in live)]
    return "\n".join(lines)


def runs_text() -> str:
    """All runs, newest first, each with the checkpoints that it has committed."""
    close_dead_runs()
    lines = []
    for directory, record in all_runs():
        unsent = "  (MLflow lacks it: --upload)" if not record.is_live and is_unsent(directory) else ""
        lines += [_line(record) + unsent, *_checkpoint_lines(directory)]
    return "\n".join(lines) or "no runs yet"


def _checkpoint_lines(directory: RunDirectory) -> list[str]:
    """The last checkpoints; what retention has deleted since is left out where that can be seen from here."""
    committed = [
        checkpoint
        for checkpoint in committed_checkpoints(directory.path)
        if "://" in checkpoint.path or Path(checkpoint.path).is_dir()
    ]
    if not committed:
        return []
    steps = ", ".join(str(checkpoint.step) for checkpoint in committed[-_CHECKPOINTS_SHOWN:])
    more = "… " if len(committed) > _CHECKPOINTS_SHOWN else ""
    return [f"    checkpoints: step {more}{steps}; --resume {committed[-1].path}"]


def _line(record: RunRecord) -> str:
    end = record.ended_at or time.time()
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created_at))
    ranks = f"{record.nproc} {record.device} rank{'s' if record.nproc != 1 else ''}"
    reason = f"  ({text})" if (text := reason_line(record)) else ""
    took = f"{end - record.created_at:8.1f} s"
    return f"{record.name:<20} {record.state:<9} {started}  {took}  {ranks:<14} {record.run_id}{reason}"


def logs_text(run: str, rank: int | None, tail: int | None) -> str:
    """Output of a run, of one rank or of all; the last ``tail`` lines of each, or everything.

    Raises:
        LookupError: There is no such run or rank.
    """
    directory, record = find_run(run)
    if rank is not None and not 0 <= rank < record.nproc:
        msg = f"run {record.name} has ranks 0 to {record.nproc - 1}"
        raise LookupError(msg)
    ranks = range(record.nproc) if rank is None else [rank]
    parts = []
    for number in ranks:
        text = read_tail(directory, number, tail)
        if rank is None:
            parts.append(f"--- rank {number} ({directory.rank_file(number, 'out')})\n")
        parts.append(text if not text or text.endswith("\n") else text + "\n")
    return "".join(parts)


def stacks_text(run: str) -> str:
    """Where every rank of a live run is, equal stacks once. The run goes on.

    Raises:
        LookupError: There is no such run, or it has no ranks now.
    """
    directory, record = find_run(run)
    if not record.is_live:
        msg = f"run {record.name} has ended: {record.state}"
        raise LookupError(msg)
    alive = {rank: process for rank, process in enumerate(record.ranks) if process is not None and process.is_alive()}
    if not alive:
        msg = f"run {record.name} has no rank now: it is starting or ending"
        raise LookupError(msg)
    collect_stacks(directory, alive, _STACKS_WAIT_S)
    lines = describe_stacks(directory, list(alive))
    ended = [rank for rank in range(record.nproc) if rank not in alive]
    if ended:
        lines.append(f"{name_ranks(ended)} {'has' if len(ended) == 1 else 'have'} ended")
    return "\n".join(lines)


def stop_run(run: str, by: str = "%air stop") -> str:
    """Ask for a run's stop, whoever launched it, and wait until it is done, so that the answer is true.

    Args:
        run: Name or id.
        by: What the run's record says of it.

    Raises:
        LookupError: There is no such run.
    """
    directory, record = find_run(run)
    if not record.is_live:
        return f"run {record.name} has ended already: {record.state}"
    directory.request_stop(by)
    end = time.monotonic() + _STOP_WAIT_S
    while time.monotonic() < end:
        time.sleep(0.05)
        if _has_ended(directory):
            return f"run {record.name} was stopped"
    why = "its ranks may save a checkpoint first" if saves_when_stopped(directory.path) else "see %air runs"
    return f"run {record.name} was asked to stop and has not ended after {_STOP_WAIT_S:g} s: {why}"


def _has_ended(directory: RunDirectory) -> bool:
    """By its record alone: it may be one of hundreds, and may move home meanwhile."""
    try:
        return locate(directory.path).read_record().state.is_final
    except (OSError, ValueError):  # it is just moving
        return False
