"""Which errors are worth another attempt."""

from __future__ import annotations

import errno
import random

import pytest

from air_nb.data.fetch import Fault, Retries, classify, retrying

_FAST = Retries(attempts=3, first_wait_s=0.001, longest_wait_s=0.001)


class _ResponseError(Exception):
    """As aiohttp's, Google's and Azure's."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"status {status}")


class _ClientError(Exception):
    """As botocore's."""

    def __init__(self, status: int) -> None:
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}
        super().__init__(f"status {status}")


def _caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error,fault",
    [
        (FileNotFoundError(errno.ENOENT, "gone"), Fault.PERMANENT),
        (PermissionError(errno.EACCES, "no"), Fault.PERMANENT),
        (OSError(errno.EROFS, "read-only"), Fault.PERMANENT),
        (TypeError("a mistake"), Fault.PERMANENT),
        (OSError(errno.EIO, "FUSE"), Fault.TRANSIENT),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Fault.TRANSIENT),
        (TimeoutError(), Fault.TRANSIENT),
        (Exception("of a library that we do not know"), Fault.TRANSIENT),
        (OSError(errno.ENOSPC, "full"), Fault.NO_SPACE),
        (OSError(errno.EDQUOT, "quota"), Fault.NO_SPACE),
        (_ResponseError(403), Fault.PERMANENT),
        (_ResponseError(404), Fault.PERMANENT),
        (_ResponseError(429), Fault.TRANSIENT),
        (_ResponseError(503), Fault.TRANSIENT),
        (_ClientError(403), Fault.PERMANENT),
        (_ClientError(500), Fault.TRANSIENT),
        (_caused_by(OSError("translated"), _ClientError(403)), Fault.PERMANENT),
        (_caused_by(PermissionError("translated"), _ClientError(503)), Fault.TRANSIENT),
    ],
)
def test_faults_by_their_errors(error, fault):
    assert classify(error) is fault


def test_what_may_pass_is_tried_again_and_its_result_returned():
    outcomes: list[Exception | str] = [TimeoutError(), ConnectionError(), "done"]
    retries = []

    def attempt() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert retrying("x", attempt, _FAST, on_retry=lambda: retries.append(1)) == "done"
    assert len(retries) == 2


@pytest.mark.parametrize(
    "error,attempts", [(TimeoutError(), 3), (PermissionError(), 1), (OSError(errno.ENOSPC, ""), 1)]
)
def test_attempts_are_bounded_and_none_is_wasted(error, attempts):
    made = []

    def attempt() -> None:
        made.append(1)
        raise error

    with pytest.raises(type(error)) as caught:
        retrying("fetching x", attempt, _FAST, on_retry=lambda: None)
    assert len(made) == attempts
    assert f"fetching x: tried {attempts} time(s)" in caught.value.__notes__[-1]


def test_the_users_random_numbers_are_not_touched():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    with pytest.raises(TimeoutError):
        retrying("x", _time_out, _FAST, on_retry=lambda: None)
    assert random.random() == expected


def _time_out() -> None:
    raise TimeoutError
