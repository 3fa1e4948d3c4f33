"""One rank as the launcher sees it: a process, its last report, and signals that can't hit a stranger."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING

from air_nb.launch import forkserver
from air_nb.protocol.start import RankReport, RankStart
from air_nb.runs.liveness import ProcessId

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["RANK_TARGET", "RankProcess"]

RANK_TARGET = "air_nb.rank.main:main"

# multiprocessing polls *all* children whenever one is started; two agents reading one child's exit code at the same
# time leave the second with 255. Everything that may poll holds this lock.
_FORK_LOCK = threading.Lock()


class RankProcess:
    """A forked rank.

    Args:
        context: Context of the warm forkserver.
        start: What the rank is told.

    Attributes:
        rank: Global rank.
        pid: Its pid, also its process group.
        identity: Its process; None if it had ended before it could be looked at.
        report: Its last word, None until it has come.
        ended_at: When its end was noticed, UTC seconds since the epoch; 0 while it lives.
    """

    def __init__(self, context: ForkServerContext, start: RankStart) -> None:
        self.rank = start.rank
        self.report: RankReport | None = None
        self.ended_at = 0.0
        self._reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=forkserver.enter_rank, args=(RANK_TARGET, start, writer), daemon=False)
        with _FORK_LOCK:
            self._process.start()
        writer.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._pidfd: int | None = None
        with suppress(ProcessLookupError):  # gone already: nothing will be signalled
            self._pidfd = os.pidfd_open(self.pid)
        self.identity = ProcessId.of(self.pid)
        self._exit_code: int | None = None

    @property
    def waitables(self) -> list[int | Connection]:
        """What becomes readable when the rank reports or ends; empty when it has ended."""
        if self._exit_code is not None:
            return []
        return [self._process.sentinel, *([] if self.report or self._reader.closed else [self._reader])]

    def poll(self) -> int | None:
        """Take in its report, if one has come; its exit code (negative: a signal), or None while it lives."""
        self._read_report()
        if self._exit_code is None:
            with _FORK_LOCK:
                self._exit_code = self._process.exitcode
            if self._exit_code is not None:
                self.ended_at = time.time()
                self._read_report()
                self._reader.close()
        return self._exit_code

    def _read_report(self) -> None:
        if self.report is not None or self._reader.closed:
            return
        try:
            if self._reader.poll():
                self.report = RankReport.decode(self._reader.recv_bytes())
        except (EOFError, OSError):
            self._reader.close()  # it ended, or closed the pipe, without a word

    def signal(self, number: signal.Signals) -> None:
        """Signal the rank and its process group, as a terminal's Ctrl-C would; nothing if it has ended."""
        if self.poll() is not None or self._pidfd is None:
            return
        try:
            # While the pidfd's process lives, its pid and thus its group can't be anyone else's. The group exists only
            # once the rank has made it; before, the rank is alone.
            signal.pidfd_send_signal(self._pidfd, 0)  # only asks
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return

    def close(self) -> None:
        """Give back the descriptors."""
        self._reader.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self._exit_code is not None:
            self._process.close()
