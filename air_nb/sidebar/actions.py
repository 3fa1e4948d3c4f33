"""What the panel asks for beyond the samples: the seam between the hub and the session, which implements it."""

from __future__ import annotations

from typing import Protocol

from air_nb.sidebar.rows import LogChunk, RootRows, RunRow

__all__ = ["Actions"]


class Actions(Protocol):
    """Rows to show and requests to carry out.

    Every method may be called from any thread, several at once, and while a cell runs in the main thread. What a person
    should be told about a request that can't be done is raised as a `LookupError` or an `air_nb.errors.AirNbError`.
    """

    def runs(self) -> list[RunRow]:
        """Newest first: all live runs of this user and the last 20 that have ended."""
        ...

    def checkpoints(self) -> list[RootRows]:
        """The roots that runs have written to, each newest first. May be slow: a disk, an object store."""
        ...

    def stop(self, run_id: str) -> str:
        """Stop a run with the ladder of an interrupt. Blocks until it has stopped; returns a sentence.

        Raises:
            LookupError: There is no such run.
        """
        ...

    def log(self, run_id: str, rank: int, offset: int) -> LogChunk:
        """At most 64 KiB of a rank's log from this offset; -1: the last 64 KiB.

        Raises:
            LookupError: There is no such run or rank.
        """
        ...

    def resume(self, run_id: str, path: str) -> str:
        """Launch the run's recorded payload again from this checkpoint, in the background; returns the new run's id.

        Raises:
            LookupError: There is no such run, or its payload is not kept.
            AirNbError: It can't be launched.
        """
        ...

    def verify(self, path: str) -> str:
        """Check every byte of a checkpoint; returns a sentence. `checkpoints` shows the result from then on."""
        ...

    def close(self) -> None:
        """End what the requests have started, within seconds: the session ends."""
        ...
