"""Where run directories live, and where sockets and locks do.

``home()`` is the user's state directory (``AIR_NB_HOME`` overrides it); ``node_local()`` is a private directory on this
machine's own disk. inotify, locks and sockets don't work across a network file system, so where the home is on one,
live runs are in ``node_local()`` and move home when they end.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import platformdirs

__all__ = ["home", "home_path", "is_network_path", "node_local", "private_directory"]

_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "fuse.sshfs"}
)
_SOCKET_PATH_MAX = 70  # of the 107 bytes of sun_path; the rest is for multiprocessing's own names


def private_directory(path: Path) -> Path:
    """Make a directory that only this user can enter.

    Raises:
        PermissionError: It exists and belongs to somebody else, as a trap in a shared ``/tmp`` would.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        msg = f"{path} belongs to user {status.st_uid} or is no directory: set AIR_NB_HOME and XDG_RUNTIME_DIR"
        raise PermissionError(msg)
    if stat.S_IMODE(status.st_mode) != 0o700:  # noqa: PLR2004 - rwx for the owner only
        path.chmod(0o700)
    return path


def home() -> Path:
    """Directory of everything that outlives a kernel; private, made if absent."""
    return private_directory(home_path())


def home_path() -> Path:
    """Where ``home()`` is, made or not."""
    return Path(os.environ.get("AIR_NB_HOME") or platformdirs.user_state_dir("air_nb")).absolute()


def node_local() -> Path:
    """Private directory on this machine: ``$XDG_RUNTIME_DIR/air_nb``, else ``<tmp>/air_nb-<uid>``."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and len(runtime) < _SOCKET_PATH_MAX and os.access(runtime, os.W_OK):
        return private_directory(Path(runtime) / "air_nb")
    return private_directory(Path(tempfile.gettempdir()) / f"air_nb-{os.getuid()}")


def is_network_path(path: Path) -> bool:
    """Whether the path is on a network file system (by the mount table of this process)."""
    resolved = path.resolve()
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, file_system, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if len(mount) >= len(best) and resolved.is_relative_to(mount):
            best, kind = mount, file_system
    return kind in _NETWORK_FILE_SYSTEMS
