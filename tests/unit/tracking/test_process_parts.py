"""What the tracking process is made of, without the process: messages, causes, environment, ``mlflow.json``."""

from __future__ import annotations

import os
import socket

import pytest
import requests
from urllib3.exceptions import MaxRetryError, NewConnectionError, ResponseError

from air_nb.protocol.tracking import TrackedState, TrackingRequest
from air_nb.runs.directory import locate
from air_nb.runs.unsent import read_tracked
from air_nb.tracking.causes import cause, is_passing, mask_passwords, one_line
from air_nb.tracking.messages import Begin, End, Finish, Finished, Message, Ready, decode, encode
from air_nb.tracking.store import use_environment
from air_nb.tracking.tracked_file import TrackedFile

_REQUEST = TrackingRequest("calm-otter-41", "http://server")


# ---------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    "message",
    [
        Begin("/runs/1", {"A": "ü\n"}),
        End("/runs/1"),
        Finish(3, ["/runs/1", "/runs/2"], {}),
        Ready(1, 77, "MLflow can't be imported"),
        Finished(3, "1", "sent."),
    ],
)
def test_a_message_is_one_line_and_arrives_as_it_was(message: Message):
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line) == message


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", b'{"type": "Unknown"}', b'{"type": "End", "x": "secret"}'])
def test_a_line_that_is_no_message_is_an_error_that_does_not_quote_it(line):
    with pytest.raises(ValueError, match="not a message") as raised:
        decode(line)
    assert "secret" not in str(raised.value)


# ------------------------------------------------------------------------------------------------------------ causes


def _wrapped(error: Exception) -> Exception:
    """As MLflow does it: another exception while the first one is handled."""
    outer = RuntimeError(f"API request to http://me:hunter2@server failed with exception {error}")
    outer.__context__ = error
    return outer


def _no_connection(reason: Exception) -> Exception:
    return _wrapped(requests.ConnectionError(MaxRetryError(None, "/", reason)))  # type: ignore[arg-type]


def _status(status: int) -> Exception:
    reason = ResponseError(ResponseError.SPECIFIC_ERROR.format(status_code=status))
    return _wrapped(requests.exceptions.RetryError(MaxRetryError(None, "/", reason)))  # type: ignore[arg-type]


def _refused() -> Exception:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    try:
        socket.create_connection(address)
    except ConnectionRefusedError as error:
        wrapper = NewConnectionError(None, "failed")  # type: ignore[arg-type]
        wrapper.__cause__ = error
        return wrapper
    raise AssertionError


@pytest.mark.parametrize(
    "error, text, passing",
    [
        (_no_connection(_refused()), "connection refused", True),
        (_wrapped(requests.ReadTimeout("read timed out")), "no answer in time", True),
        (_status(503), "the server answered with error 503", True),
        (_status(500), "the server answered with error 500", False),
        (ValueError("no such run."), "no such run", False),
        (KeyError(), "KeyError", False),
    ],
)
def test_the_cause_is_found_behind_what_mlflow_makes_of_it(error, text, passing):
    assert cause(error) == text
    assert is_passing(error) is passing


def test_a_cause_is_one_line_of_bounded_length_without_passwords():
    text = cause(ValueError("first\n  second http://me:hunter2@server/ " + "x" * 1000))
    assert text.startswith("first second http://me:***@server/ xxx")
    assert len(text) < 310


def test_only_the_password_is_masked():
    assert mask_passwords("postgresql+psycopg://me:a.b!c@db:5432/x") == "postgresql+psycopg://me:***@db:5432/x"
    assert mask_passwords("http://127.0.0.1:5000/a@b") == "http://127.0.0.1:5000/a@b"
    assert one_line("a\n b") == "a b"


# ------------------------------------------------------------------------------------------------------- environment


@pytest.fixture
def environment():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_the_kernels_environment_replaces_our_own(environment):
    os.environ["MLFLOW_TRACKING_TOKEN"] = "of the run before"
    use_environment({"AWS_PROFILE": "mine", "MLFLOW_RUN_ID": "0" * 32})
    assert os.environ["AWS_PROFILE"] == "mine"
    assert "MLFLOW_TRACKING_TOKEN" not in os.environ
    assert "MLFLOW_RUN_ID" not in os.environ


def test_waits_for_a_server_are_short_unless_the_user_has_set_them(environment):
    use_environment({})
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    use_environment({"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4", "MLFLOW_HTTP_REQUEST_TIMEOUT": "77"})
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "4"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"


# ------------------------------------------------------------------------------------------------------- mlflow.json


def test_nothing_is_written_before_there_is_something_to_say(tmp_path):
    file = TrackedFile(tmp_path, _REQUEST)
    file.update(problem=None)
    assert file.now.state is TrackedState.PENDING
    file.update(problem="no answer.")
    assert read_tracked(tmp_path) == file.now


def test_a_full_disk_keeps_it_in_memory_until_there_is_room(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    file = TrackedFile(run, _REQUEST)
    run.rmdir()
    file.update(problem="no answer.")
    assert file.now.problem == "no answer."
    assert "can't be written" in capsys.readouterr().err
    run.mkdir()
    file.update(problem="no answer.")
    assert read_tracked(run) == file.now


def test_what_is_refused_is_listed_once_and_not_without_end(tmp_path):
    file = TrackedFile(tmp_path, _REQUEST)
    for number in [1, *range(100)]:
        file.refuse(f"value {number}")
    assert file.now.refused[:3] == ["value 1", "value 0", "value 2"]
    assert len(file.now.refused) == 21
    assert file.now.refused[-1].startswith("More was refused")


def test_a_directory_that_was_moved_home_is_found_there(tmp_path, test_environment):
    away = tmp_path / "20270101-000000-00000000"
    home = test_environment / "runs" / away.name
    assert locate(away).path == home
    away.mkdir()
    assert locate(away).path == away
