from __future__ import annotations

from pathlib import Path

import pytest

from air_nb.protocol.tracking import TrackingRequest
from air_nb.tracking.artifacts import Artifacts, copy_capped
from air_nb.tracking.store import StoreError
from air_nb.tracking.tracked_file import TrackedFile


class _Run:
    """Stands for ``MlflowRun``: keeps what it is sent."""

    def __init__(self, *, takes: bool = True, usable: bool = True) -> None:
        self.files: list[tuple[str, str]] = []
        self.takes = takes
        self.usable = usable

    def log_files(self, source: Path, artifact_path: str | None) -> None:
        if not self.takes:
            raise StoreError("http://server", "413 Request Entity Too Large", passing=True)
        files = source.iterdir() if source.is_dir() else [source]
        self.files += [("/".join(filter(None, [artifact_path, file.name])), file.read_text()) for file in files]

    def prove_usable(self) -> None:
        if not self.usable:
            raise StoreError("http://server", "connection refused", passing=True)


@pytest.fixture
def tracked(tmp_path) -> TrackedFile:
    return TrackedFile(tmp_path, TrackingRequest("calm-otter-41", "http://server"))


def _artifacts(path: Path, run: _Run, tracked: TrackedFile) -> Artifacts:
    return Artifacts(path, run, tracked)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- the cap


def test_a_log_within_the_cap_is_copied_as_it_is(tmp_path):
    (tmp_path / "log").write_bytes(b"h" * 10 + b"t" * 40)
    copy_capped(tmp_path / "log", tmp_path / "copy", head=10, tail=40)
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "log").read_bytes()


def test_of_a_longer_log_beginning_and_end_are_kept_and_a_line_says_what_is_missing(tmp_path):
    (tmp_path / "log").write_bytes(b"h" * 10 + b"m" * 12345 + b"t" * 40)
    copy_capped(tmp_path / "log", tmp_path / "copy", head=10, tail=40)
    head, note, tail = (tmp_path / "copy").read_bytes().split(b"\n")
    assert (head, tail) == (b"h" * 10, b"t" * 40)
    assert b"12,345 bytes left out" in note
    assert str(tmp_path / "log").encode() in note


# -------------------------------------------------------------------------------------------------------------- logs


def test_only_logs_that_have_changed_are_sent_again(tmp_path, tracked):
    (tmp_path / "rank_0.out").write_text("hello\n")
    (tmp_path / "rank_1.out").write_text("hello\n")
    (tmp_path / "rank_0.err").touch()
    run = _Run()
    artifacts = _artifacts(tmp_path, run, tracked)
    artifacts.send_logs(final=True)
    (tmp_path / "rank_1.out").write_text("hello\nagain\n")
    artifacts.send_logs(final=True)
    assert run.files == [
        ("logs/rank_0.out", "hello\n"),
        ("logs/rank_1.out", "hello\n"),
        ("logs/rank_1.out", "hello\nagain\n"),
    ]


def test_while_the_run_goes_on_logs_are_sent_when_it_is_time(tmp_path, tracked, monkeypatch):
    (tmp_path / "rank_0.out").write_text("hello\n")
    run = _Run()
    artifacts = _artifacts(tmp_path, run, tracked)
    artifacts.send_logs(final=False)
    assert run.files == []
    monkeypatch.setattr(artifacts, "_due_at", 0.0)
    artifacts.send_logs(final=False)
    assert len(run.files) == 1


def test_a_log_that_the_store_does_not_take_is_tried_again_and_refused_in_the_end(tmp_path, tracked):
    (tmp_path / "rank_0.out").write_text("hello\n")
    run = _Run(takes=False)
    artifacts = _artifacts(tmp_path, run, tracked)
    artifacts._due_at = 0.0
    artifacts.send_logs(final=False)
    assert tracked.now.refused == []
    artifacts.send_logs(final=True)
    assert tracked.now.refused == ["Artifact logs/rank_0.out: 413 Request Entity Too Large."]


def test_artifacts_that_can_not_be_sent_because_nobody_is_there_are_not_refused(tmp_path, tracked):
    (tmp_path / "rank_0.out").write_text("hello\n")
    with pytest.raises(StoreError, match="connection refused"):
        _artifacts(tmp_path, _Run(takes=False, usable=False), tracked).send_logs(final=True)
    assert tracked.now.refused == []


# ----------------------------------------------------------------------------------------------- copies left by ranks


def test_a_copy_that_was_sent_already_is_no_error(tmp_path, tracked):
    run = _Run()
    _artifacts(tmp_path, run, tracked).send_spooled("copies/gone", None)
    assert run.files == []


@pytest.mark.parametrize("relative", ["../outside.txt", "link", ".", "/etc/hostname"])
def test_nothing_outside_the_run_directory_is_sent_or_deleted(tmp_path, relative):
    folder = tmp_path / "run"
    folder.mkdir()
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    (folder / "link").symlink_to(outside)
    run = _Run()
    tracked = TrackedFile(folder, TrackingRequest("calm-otter-41", "http://server"))
    _artifacts(folder, run, tracked).send_spooled(relative, None)
    assert run.files == []
    assert outside.read_text() == "mine"
    assert folder.is_dir()
