"""The autouse fixture that fails a test for what it leaves behind does fail it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

pytest_plugins = ["pytester"]

_CONFTEST = Path(__file__).parents[1] / "conftest.py"

_LEAKING = """
import os, subprocess, threading

held = []

def test_files():
    held.extend(open(os.devnull) for _ in range(20))

def test_thread():
    threading.Thread(target=threading.Event().wait, args=(2,), name="forgotten").start()

def test_daemon_thread_of_ours():
    threading.Thread(target=threading.Event().wait, args=(20,), name="air_nb-pump", daemon=True).start()

def test_child():
    held.append(subprocess.Popen(["sleep", "61.25"]))

def test_orphan():
    subprocess.run(["setsid", "sh", "-c", "sleep 61.75 >/dev/null 2>&1 &"], check=True)
"""

_CLEAN = """
import os, subprocess, threading

import pytest

@pytest.fixture(scope="module")
def server():
    with subprocess.Popen(["sleep", "61"]) as process:
        yield process
        process.kill()

def test_uses_a_server_of_a_wider_fixture(server):
    assert server.poll() is None

def test_cleans_up(tmp_path):
    with (tmp_path / "x").open("w"):
        subprocess.run(["true"], check=True)

def test_ends_a_moment_later():
    threading.Timer(0.2, int).start()
    held.append(subprocess.Popen(["sleep", "0.2"]))

held = []

def test_environment_is_its_own():
    assert "air_nb_home" in os.environ["AIR_NB_HOME"]
    assert not {"RANK", "TORCHELASTIC_RUN_ID", "PYTHONUNBUFFERED"} & set(os.environ)
"""


def _run(pytester: pytest.Pytester, source: str, *, grace_s: float) -> pytest.RunResult:
    conftest = _CONFTEST.read_text()
    assert "_GRACE_S = 3.0" in conftest
    pytester.makeconftest(conftest.replace("_GRACE_S = 3.0", f"_GRACE_S = {grace_s}"))
    pytester.makepyfile(source)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider")


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # half of a nested run's time


def test_a_test_that_leaves_something_behind_fails_and_says_what(pytester: pytest.Pytester):
    result = _run(pytester, _LEAKING, grace_s=0.5)
    result.assert_outcomes(passed=5, errors=5)
    for complaint in (
        "fd * -> /dev/null",
        "thread forgotten",
        "thread air_nb-pump",
        "process *: sleep 61.25",
        "process *: sleep 61.75",
    ):
        result.stdout.fnmatch_lines(["*left behind after the test:*", f"*{complaint}*"])
    left = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "61.75"]]
    assert not left, "what a test left behind must be ended, or it disturbs the next one"


def test_a_test_that_cleans_up_passes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    for name in ("AIR_NB_HOME", "RANK", "TORCHELASTIC_RUN_ID", "PYTHONUNBUFFERED"):
        monkeypatch.setenv(name, "of the caller")
    _run(pytester, _CLEAN, grace_s=3.0).assert_outcomes(passed=4)
