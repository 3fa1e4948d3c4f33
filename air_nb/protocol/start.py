"""Launcher -> rank: what a forked rank is told, and rank -> launcher: how it ended. Both cross inherited pipes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["STACKS_SIGNAL_OFFSET", "RankReport", "RankStart"]

STACKS_SIGNAL_OFFSET = 6
"""SIGRTMIN plus this asks a rank for its Python stacks; SIGUSR1 and SIGUSR2 are left to Slurm and to users."""


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a rank is told when it is forked.

    Attributes:
        run_id: The run.
        directory: Its run directory.
        rank: Global rank.
        attempt: Number of restarts before.
        env: The rank's whole environment, torchrun's variables included.
    """

    run_id: str
    directory: str
    rank: int
    attempt: int
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's last word; a rank that ends without one has failed, whatever its exit code.

    Attributes:
        ok: Whether the cell or function ended well and its values are written.
        at: When, UTC seconds since the epoch.
        type_name: Qualified name of the exception.
        message: Its text.
        traceback: Formatted on the rank, with the lines of the cell.
        exit_code: Code of ``sys.exit``, else None.
        in_collective: Raised inside torch.distributed: likely because another rank is gone.
    """

    ok: bool
    at: float
    type_name: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    in_collective: bool = False

    def encode(self) -> bytes:
        """JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankReport:
        """Read what ``encode`` wrote."""
        return cls(**json.loads(data))
