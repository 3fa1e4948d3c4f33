"""Which part of a failure's traceback is the user's. Pure."""

from __future__ import annotations

from pickle import PicklingError
from typing import TYPE_CHECKING

from air_nb.errors import AirNbError

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator

__all__ = ["users_part"]

_NOT_THE_USERS = frozenset({"air_nb", "IPython", "asyncio", "pdb", "bdb"})


def users_part(error: BaseException) -> types.TracebackType | None:
    """From the user's first frame to the last; the frames of air_nb and IPython around them say nothing.

    Frames below the user's stay, except where air_nb itself refuses something: the line that asked for it matters then.
    The traceback of the error is changed for that.
    """
    traces = list(_chain(error.__traceback__))
    users = [index for index, trace in enumerate(traces) if _package(trace) not in _NOT_THE_USERS]
    if not users:
        # A refusal and a full disk explain themselves; anything else is a bug of ours, shown whole.
        return None if isinstance(error, (AirNbError, PicklingError, OSError)) else error.__traceback__
    if _package(traces[-1]) == "air_nb":
        traces[users[-1]].tb_next = None
    return traces[users[0]]


def _chain(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _package(trace: types.TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
