"""Files of a run directory that become artifacts: the ranks' output, again and again, and what describes the run, once.

Sent are copies, made for the moment: a file that grows while it is sent would be longer than was announced.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from air_nb.runs.directory import locate
from air_nb.tracking.causes import one_line
from air_nb.tracking.mlflow_run import MlflowRun
from air_nb.tracking.store import StoreError
from air_nb.tracking.tracked_file import TrackedFile

__all__ = ["Artifacts", "copy_capped"]

_HEAD_BYTES = 1 << 20
_TAIL_BYTES = 4 << 20
_LOGS_EVERY_S = 30.0
_LOGS_MAX_SHARE = 0.05  # of the time may go into sending logs


class Artifacts:
    """Artifacts of one run; used by one thread. Every method raises ``StoreError`` if the store is not there.

    Args:
        path: Run directory.
        run: The MLflow run.
        tracked: Where it is noted what the store does not take.
    """

    def __init__(self, path: Path, run: MlflowRun, tracked: TrackedFile) -> None:
        self._path = path
        self._run = run
        self._tracked = tracked
        self._sent: dict[str, tuple[int, int]] = {}
        self._due_at = time.monotonic() + _LOGS_EVERY_S

    def describe(self, captured: Mapping[str, int]) -> None:
        """Send the source, and the names that were captured with their sizes."""
        source = locate(self._path).path / "cell.py"
        if source.exists():
            self._send(source, None)
        with TemporaryDirectory(prefix="air_nb-") as directory:
            file = Path(directory) / "captured.json"
            file.write_text(json.dumps({name: {"pickled_bytes": size} for name, size in captured.items()}, indent=1))
            self._send(file, None)

    def send_logs(self, *, final: bool) -> None:
        """Send the ranks' output as far as it has changed: at the end, or when it is time again."""
        if not final and time.monotonic() < self._due_at:
            return
        started = time.monotonic()
        folder = locate(self._path).path
        for source in sorted([*folder.glob("rank_*.out"), *folder.glob("rank_*.err")]):
            status = source.stat()
            state = (status.st_size, status.st_mtime_ns)
            if status.st_size and self._sent.get(source.name) != state and self._send_log(source, final=final):
                self._sent[source.name] = state
        took_s = time.monotonic() - started
        self._due_at = time.monotonic() + max(_LOGS_EVERY_S, took_s / _LOGS_MAX_SHARE)

    def _send_log(self, source: Path, *, final: bool) -> bool:
        try:
            with TemporaryDirectory(prefix="air_nb-") as directory:
                copy = Path(directory) / source.name
                copy_capped(source, copy)
                return self._send(copy, "logs", is_last_try=final)
        except OSError as error:  # the disk is full, most likely
            self._refuse(f"logs/{source.name}", str(error))
            return False

    def send_spooled(self, relative: str, artifact_path: str | None) -> None:
        """Send a copy that a rank has left in the run directory, and delete it."""
        folder = locate(self._path).path.resolve()
        source = (folder / relative).resolve()
        if source == folder or not source.is_relative_to(folder) or not source.exists():
            return  # sent already, by a process that could not note it any more
        self._send(source, artifact_path)
        if source.is_dir():
            shutil.rmtree(source, ignore_errors=True)
        else:
            source.unlink(missing_ok=True)

    def _send(self, source: Path, artifact_path: str | None, *, is_last_try: bool = True) -> bool:
        """Whether the store took it. If not, other artifacts and the end of the run don't wait for it."""
        try:
            self._run.log_files(source, artifact_path)
        except StoreError as error:
            self._run.prove_usable()
            if is_last_try:
                self._refuse(f"{artifact_path}/{source.name}" if artifact_path else source.name, error.why)
            return False
        return True

    def _refuse(self, name: str, why: str) -> None:
        sys.stderr.write(f"air_nb: run {self._path.name}: artifact {name}: {why}\n")
        self._tracked.refuse(one_line(f"Artifact {name}: {why}") + ".")


def copy_capped(source: Path, target: Path, *, head: int = _HEAD_BYTES, tail: int = _TAIL_BYTES) -> None:
    """Copy a log; of a long one the beginning and the end, with a line between that says what is missing.

    Args:
        source: May grow meanwhile.
        target: New file.
        head: Bytes from the beginning.
        tail: Bytes from the end.
    """
    with source.open("rb") as reading, target.open("wb") as writing:
        size = source.stat().st_size
        if size <= head + tail:
            writing.write(reading.read(size))
            return
        writing.write(reading.read(head))
        writing.write(f"\n... {size - head - tail:,} bytes left out here; the whole file: {source} ...\n".encode())
        reading.seek(size - tail)
        writing.write(reading.read(tail))
