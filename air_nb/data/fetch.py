"""Try again what may pass, give up at once on what will not: errors of storage by class, and bounded retries."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from air_nb.errors import AirNbError

__all__ = ["Fault", "Retries", "classify", "retrying"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_PERMANENT = frozenset(
    {
        *(errno.ENOENT, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR),
        *(errno.ENAMETOOLONG, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ELOOP, errno.EFBIG, errno.ENXIO),
    }
)
_PERMANENT_TYPES = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(AirNbError, TypeError, ValueError, AttributeError, LookupError, ImportError, NotImplementedError, MemoryError),
)
_STATUS_NAMES = ("status", "status_code", "code")
_PASSING_STATUS = frozenset({408, 425, 429})  # HTTP: timeout, too early, too many requests


class Fault(StrEnum):
    """What to do about an error of storage.

    PERMANENT: nothing there, not allowed, a mistake in the program. TRANSIENT: time-outs, lost connections, errors of
    the server, and what we do not know. NO_SPACE: this machine's disk is full.
    """

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    NO_SPACE = "no space"


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and how patiently one file is tried.

    Attributes:
        attempts: At most that many, the first included.
        first_wait_s: Wait before the second attempt; doubled each time, and shortened at random by up to a half, so
            that ranks that failed together do not come back together.
        longest_wait_s: Bound of one wait.
        timeout_s: What one attempt may take, plus a second for each MiB. It can only be kept for storage that fsspec
            reaches over the network itself; reading a mount that hangs can't be given up.
    """

    attempts: int = 5
    first_wait_s: float = 0.5
    longest_wait_s: float = 15.0
    timeout_s: float = 60.0


def classify(error: BaseException) -> Fault:
    """What kind of fault an exception of fsspec, of its back ends or of the operating system tells of."""
    status = _http_status(error)
    if status is not None:
        is_final = 400 <= status < 500 and status not in _PASSING_STATUS  # noqa: PLR2004 - the client's errors
        return Fault.PERMANENT if is_final else Fault.TRANSIENT
    number = error.errno if isinstance(error, OSError) else None
    if number in _NO_SPACE:
        return Fault.NO_SPACE
    if isinstance(error, _PERMANENT_TYPES) or number in _PERMANENT:
        return Fault.PERMANENT
    return Fault.TRANSIENT


def retrying(what: str, action: Callable[[], _T], retries: Retries, *, on_retry: Callable[[], object]) -> _T:
    """Call a function until it does not raise a transient fault, a bounded number of times.

    Args:
        what: What is being done, for the log.
        action: Must leave nothing behind that its repetition would trip over.
        retries: How often.
        on_retry: Called before each repetition.

    Raises:
        Exception: What ``action`` raised: at once if it is permanent or the disk is full, else the last time. A note
            says how often it was tried.
    """
    started_at = time.monotonic()
    for attempt, wait_s in enumerate(_waits_s(retries), start=1):
        try:
            return action()
        except Exception as error:  # back ends raise what they like; what is not transient goes on at once
            if classify(error) is not Fault.TRANSIENT or wait_s is None:
                error.add_note(f"{what}: tried {attempt} time(s) in {time.monotonic() - started_at:.1f} s")
                raise
            _log.warning("%s failed (%r): attempt %d of %d follows", what, error, attempt + 1, retries.attempts)
        time.sleep(wait_s)
        on_retry()
    raise AssertionError(retries)  # the last wait is None


def _waits_s(retries: Retries) -> Iterator[float | None]:
    """The wait after each attempt, None after the last."""
    chance = random.Random()  # noqa: S311 - not a secret; not the global one, whose state is the user's
    for number in range(retries.attempts - 1):
        yield min(retries.first_wait_s * 2**number, retries.longest_wait_s) * chance.uniform(0.5, 1.0)
    yield None


def _http_status(error: BaseException) -> int | None:
    """Status of the response behind an error of aiohttp, botocore, requests, Google's or Azure's clients."""
    # Only of the error itself: aiohttp's "connection cut" is caused by one of its parser, whose code is 400.
    own = next((value for name in _STATUS_NAMES if isinstance(value := getattr(error, name, None), int)), None)
    seen: BaseException | None = error
    while own is None and seen is not None:  # s3fs translates: the response is in the cause
        own = _response_status(getattr(seen, "response", None))
        seen = seen.__cause__
    return own if own is not None and 400 <= own < 600 else None  # noqa: PLR2004 - statuses that are errors


def _response_status(response: Any) -> int | None:
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None
