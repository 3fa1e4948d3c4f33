"""What the panel's tables show and its buttons do: ``air_nb.sidebar.actions.Actions``, for one session.

Called on the hub's threads, never on the main one, which may be in a cell for hours. Own threads are those of the runs
that were launched again (``relaunch``) and of listings (``roots``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from air_nb.errors import CheckpointError
from air_nb.runs.chunks import Position, read_chunk, read_end, seek
from air_nb.runs.directory import locate
from air_nb.runs.index import RunIndex
from air_nb.runs.text import ending_text
from air_nb.session.checkpoint_rows import CheckpointTable
from air_nb.session.commands import stop_run
from air_nb.session.relaunch import BackgroundRun, relaunch
from air_nb.session.run_rows import RunRows
from air_nb.sidebar.rows import LogChunk

if TYPE_CHECKING:
    from air_nb.runs.directory import RunDirectory
    from air_nb.session.session import Session
    from air_nb.sidebar.rows import RootRows, RunRow

__all__ = ["PanelActions"]

_POSITIONS_KEPT = 256
_CLOSE_S = 5.0


class PanelActions:
    """See the module, and ``Actions`` for what each method does. Thread-safe.

    Args:
        session: Launches what is resumed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._index = RunIndex()
        self._rows = RunRows()
        self._checkpoints = CheckpointTable()
        self._lock = threading.Lock()
        self._positions: OrderedDict[tuple[str, int, int], Position] = OrderedDict()
        self._background: list[BackgroundRun] = []
        self._is_closed = False

    def runs(self) -> list[RunRow]:
        """See ``Actions``."""
        return self._rows.rows(self._index.runs())

    def checkpoints(self) -> list[RootRows]:
        """See ``Actions``. Waits a quarter of a second at most: what takes longer is there the next time."""
        return self._checkpoints.rows(self._index.runs())

    def stop(self, run_id: str) -> str:
        """See ``Actions``."""
        self._index.find(run_id)  # `stop_run` takes names, too
        return stop_run(run_id, by="Stop in the panel")

    def log(self, run_id: str, rank: int, offset: int) -> LogChunk:
        """See ``Actions``: both streams, in the order of ``%air logs``; behind them, how the run failed.

        Offsets count the bytes of both files.
        """
        directory, record = self._index.find(run_id)
        if not 0 <= rank < record.nproc:
            msg = f"run {record.name} has ranks 0 to {record.nproc - 1}"
            raise LookupError(msg)
        text, begin, position, at_end = self._read(locate(directory.path), rank, offset, final=not record.is_live)
        with self._lock:
            self._positions[run_id, rank, position.offset] = position
            while len(self._positions) > _POSITIONS_KEPT:
                self._positions.popitem(last=False)
        is_end = at_end and not record.is_live
        if is_end and (ending := ending_text(record, rank)):
            text += f"\n{ending}" if text and not text.endswith("\n") else ending
        return LogChunk(run_id, rank, begin, position.offset, text, is_end)

    def _read(self, directory: RunDirectory, rank: int, offset: int, *, final: bool) -> tuple[str, int, Position, bool]:
        if offset < 0:
            return read_end(directory, rank, final=final)
        with self._lock:
            start = self._positions.get((directory.run_id, rank, offset))
        start = start or seek(directory, rank, offset)
        text, position, at_end = read_chunk(directory, rank, start, final=final)
        return text, start.offset, position, at_end

    def resume(self, run_id: str, path: str) -> str:
        """See ``Actions`` and ``relaunch``.

        Raises:
            LookupError: There is no such run.
            CheckpointError: There is no such checkpoint.
            AirNbError: It can't be launched; the message says why.
        """
        directory, record = self._index.find(run_id)
        if "://" not in path and not Path(path).is_dir():
            msg = f"the checkpoint {path} is not there any more"
            raise CheckpointError(msg)
        run = relaunch(self._session, directory, record, path)
        with self._lock:
            self._background = [one for one in self._background if not one.is_over]
            self._background.append(run)
            is_closed = self._is_closed
        if is_closed:  # meanwhile
            run.stop()
        return run.run_id

    def verify(self, path: str) -> str:
        """See ``Actions``.

        Raises:
            CheckpointError: It is being checked already, or can't be read.
        """
        try:
            return self._checkpoints.verify(path)
        except OSError as error:
            msg = f"{path} can't be read: {error}"
            raise CheckpointError(msg) from error

    def close(self) -> None:
        """End the runs that were resumed here, and wait for that (bounded)."""
        with self._lock:
            self._is_closed = True
            background, self._background = self._background, []
        for run in background:
            run.stop()
        for run in background:
            run.join(_CLOSE_S)
