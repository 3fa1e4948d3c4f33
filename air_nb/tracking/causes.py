"""What an exception of MLflow's means, in few words: its own are long, and hold URLs with passwords."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

__all__ = ["cause", "is_passing", "mask_passwords", "one_line"]

_PASSWORD = re.compile(r"(?<=://)([^\s:/@'\"]*):[^\s/@'\"]+(?=@)")
_MAX_CHARACTERS = 300
_MAX_DEPTH = 10

# Answers of a server, or of a database behind MLflow, that say nothing against what was sent.
_PASSING_CODES = frozenset(
    {
        "TEMPORARILY_UNAVAILABLE",
        "REQUEST_LIMIT_EXCEEDED",
        "RESOURCE_EXHAUSTED",
        "DEADLINE_EXCEEDED",
        "ABORTED",
        "CANCELLED",
        "UNAUTHENTICATED",
        "CUSTOMER_UNAUTHORIZED",
        "PERMISSION_DENIED",
    }
)


def mask_passwords(text: str) -> str:
    """The text without the passwords in its URLs."""
    return _PASSWORD.sub(r"\1:***", text)


def one_line(text: str) -> str:
    """The text as a line of bounded length."""
    line = " ".join(mask_passwords(text).split())
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]} …"


def cause(error: BaseException) -> str:
    """Why it failed, as the end of a sentence."""
    return one_line(_network_cause(error) or _database_cause(error) or str(error) or type(error).__name__).rstrip(". ")


def is_passing(error: BaseException) -> bool:
    """Whether it is about the connection, the load or the permissions, and not about what was sent."""
    import requests

    for link in _chain(error):
        if isinstance(link, (requests.ConnectionError, requests.Timeout)):
            return True
        if isinstance(link, requests.exceptions.RetryError):
            return _status_of(link) != 500  # noqa: PLR2004 - Internal Server Error: it may have stumbled over this one
        if getattr(link, "error_code", None) in _PASSING_CODES:
            return True
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it, the newest first."""
    for _ in range(_MAX_DEPTH):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _network_cause(error: BaseException) -> str | None:
    import requests

    for link in _chain(error):
        if isinstance(link, ConnectionRefusedError):
            return "connection refused"
        if isinstance(link, requests.Timeout):
            return "no answer in time"
        if isinstance(link, requests.exceptions.RetryError) and (status := _status_of(link)):
            return f"the server answered with error {status}"
        if isinstance(link, requests.exceptions.SSLError):
            return f"no trusted TLS connection ({_innermost(link)})"
        if isinstance(link, requests.ConnectionError):
            return _connection_cause(link)
    return None


def _connection_cause(error: BaseException) -> str:
    from urllib3.exceptions import NameResolutionError

    if any(isinstance(link, ConnectionRefusedError) for link in _reasons(error)):
        return "connection refused"
    if any(isinstance(link, NameResolutionError) for link in _reasons(error)):
        return "no such host"
    return f"no connection ({_innermost(error)})"


def _reasons(error: Any) -> Iterator[BaseException]:
    """Follow what urllib3 wraps: ``args`` of requests' errors, ``reason`` of ``MaxRetryError``, then the chain."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(error, BaseException):
            return
        yield error
        inner = getattr(error, "reason", None) or next((arg for arg in error.args if isinstance(arg, Exception)), None)
        error = inner or error.__cause__ or error.__context__


def _innermost(error: BaseException) -> str:
    *_, last = _reasons(error)
    return f"{type(last).__name__}: {last}"


def _status_of(error: BaseException) -> int | None:
    """HTTP status that made urllib3 give up."""
    from urllib3.exceptions import ResponseError

    pattern = re.escape(ResponseError.SPECIFIC_ERROR).replace(re.escape("{status_code}"), r"(\d+)")
    for link in _reasons(error):
        if isinstance(link, ResponseError) and (found := re.fullmatch(pattern, str(link))):
            return int(found[1])
    return None


def _database_cause(error: BaseException) -> str | None:
    """What the driver says; SQLAlchemy adds the statement with all its values."""
    for link in _chain(error):
        original = getattr(link, "orig", None)
        if isinstance(original, BaseException):
            return str(original)
    return None
