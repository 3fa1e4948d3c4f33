"""Directories that dead launchers left, and events that come when nobody waits any more."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from air_nb.launch.client import RunEvents, sweep_dead_launchers
from air_nb.protocol.messages import Exited
from air_nb.runs.paths import node_local


@pytest.fixture
def own_node_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return node_local()


def test_directories_of_dead_kernels_are_swept_and_no_others(own_node_local: Path):
    with subprocess.Popen(["true"]) as dead:
        pass
    gone = own_node_local / f"launcher-{dead.pid}-5"
    kept = [own_node_local / f"launcher-{os.getpid()}-7", own_node_local / "launcher-odd", own_node_local / "gpu-1"]
    for path in (gone, *kept):
        path.mkdir()
    sweep_dead_launchers()
    assert not gone.exists()
    assert all(path.exists() for path in kept)


def test_a_waiter_that_does_not_read_never_blocks_the_reader_thread():
    events = RunEvents()
    for rank in range(100_000):  # the pipe holds 65,536 bytes
        events.put(Exited("run", rank))
    assert len(events.take()) == 100_000
    events.close()
