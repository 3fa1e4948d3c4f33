"""The rows of the panel's tables, as the page draws them. Pure data: whoever fills them in reads the files.

Times are seconds since the epoch, unknown is None. The names of the fields are the names in the messages.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CheckpointRow", "Link", "LogChunk", "RootRows", "RunRow"]


@dataclass(frozen=True, slots=True)
class Link:
    """Where a run can be looked at: MLflow's page of it, or a text that says where it is kept when there is no page."""

    href: str | None
    label: str
    text: str


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run of this user.

    Attributes:
        run_id: The run's id.
        name: Its name.
        state: A value of `runs.record.RunState`.
        is_live: Whether its processes are there: the panel offers Stop.
        is_mine: Whether this kernel has launched it.
        notebook: The notebook that has launched it.
        nproc: Number of ranks.
        device: ``cuda`` or ``cpu``.
        created_at: When it was asked for.
        started_at: When the ranks began; None before.
        ended_at: When it ended; None before.
        reason: Why it ended so, one line; empty if there is nothing to say.
        line: The last line that rank 0 has printed: at most 200 characters, no control characters.
        figures: What loading data and saving checkpoints cost at last, one line; empty if nothing is known.
        link: Where MLflow shows it.
        can_resume: Whether its payload is kept, so that it can be launched again.
    """

    run_id: str
    name: str
    state: str
    is_live: bool
    is_mine: bool
    notebook: str | None
    nproc: int
    device: str
    created_at: float
    started_at: float | None
    ended_at: float | None
    reason: str
    line: str
    figures: str
    link: Link | None
    can_resume: bool


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint below a root.

    Attributes:
        path: Its folder, or its address in an object store.
        step: The step that it was taken after; None if it can't be read.
        created_at: When it was committed.
        size_bytes: Size of all its files.
        state: committed, foreign, incomplete or damaged.
        verified: What the last deep check found; None if there was none.
        verifying: Whether a deep check runs now.
        problem: Why it is not good, one line; empty if it is.
        run_id: The run that wrote it.
        run_name: That run's name.
        can_resume: Whether that run can be launched again from here.
    """

    path: str
    step: int | None
    created_at: float | None
    size_bytes: int | None
    state: str
    verified: bool | None
    verifying: bool
    problem: str
    run_id: str | None
    run_name: str | None
    can_resume: bool


@dataclass(frozen=True, slots=True)
class RootRows:
    """The checkpoints of one root, newest first; `problem` says why there are none to see. `more` were left out."""

    root: str
    problem: str
    checkpoints: tuple[CheckpointRow, ...]
    more: int = 0


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A piece of a rank's log.

    Attributes:
        run_id: The run.
        rank: The rank.
        offset: Where the piece begins, in bytes of the file.
        next_offset: Where the next one begins.
        text: The text, at most 64 KiB of the file.
        is_end: Whether the run has ended and nothing comes after this.
    """

    run_id: str
    rank: int
    offset: int
    next_offset: int
    text: str
    is_end: bool
