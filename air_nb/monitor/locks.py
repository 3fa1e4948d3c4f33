"""One lock per GPU, so that two notebooks of a user never choose the same one.

A lock is an flock on ``gpu-<uuid>.lock`` in a directory of the user on this machine: the kernel that runs the ranks
holds it, and however that process ends, the operating system lets go of it. The file's text says who holds it and means
nothing without the lock. Files are never deleted: a lock on a deleted file would exclude nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from air_nb.errors import DeviceError
from air_nb.runs.forked import abandon_in_children

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

__all__ = ["GpuLocks", "Held", "Taken", "default_lock_directory"]

_PREFIX, _SUFFIX = "gpu-", ".lock"
_PROBE_TRIES = 100
_PROBE_PAUSE_S = 0.002
_OWNER_BYTES = 500


class Taken(Exception):  # noqa: N818 - an answer to "may I have it", not a failure
    """Another run holds the lock of this GPU.

    Attributes:
        uuid: Of the GPU.
        owner: Who holds it, as that run wrote it.
    """

    def __init__(self, uuid: str, owner: str) -> None:
        super().__init__(uuid, owner)
        self.uuid = uuid
        self.owner = owner

    def __str__(self) -> str:
        return f"GPU {self.uuid} is taken by {self.owner}"


class Held:
    """Locks that this process holds, until `close`, the end of the ``with`` block, or the end of the process."""

    def __init__(self, descriptors: dict[str, int]) -> None:
        self._descriptors = descriptors
        abandon_in_children(self)

    @property
    def uuids(self) -> tuple[str, ...]:
        """The GPUs held now."""
        return tuple(self._descriptors)

    def close(self) -> None:
        """Let go of all of them; can be called twice."""
        while self._descriptors:
            _, descriptor = self._descriptors.popitem()
            # Unlocked, not only closed: a child forked past Python may still have the descriptor, and with it the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def abandon(self) -> None:
        """In a forked child: close the copies, without unlocking what the parent holds."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class GpuLocks:
    """The locks in one directory.

    Args:
        directory: Where the lock files are; made when first needed, for this user only. It must be on this machine,
            since UUIDs are about its GPUs and flock is not dependable on network file systems.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def acquire(self, uuids: Iterable[str], owner: str) -> Held:
        """Lock all of these GPUs, or none.

        Args:
            uuids: Of the GPUs.
            owner: One line for others to read: which run in which process.

        Raises:
            Taken: if another run, in this process or another one, holds one of them.
            DeviceError: if the directory can't be used.
        """
        self._make_directory()
        held = Held({})
        try:
            for uuid in sorted(set(uuids)):  # in one order: of two runs that want overlapping GPUs one gets its own
                held._descriptors[uuid] = self._lock(uuid, owner)  # noqa: SLF001 - one module
        except BaseException:
            held.close()
            raise
        return held

    def held_uuids(self) -> dict[str, str]:
        """UUIDs of the GPUs that are locked now, by this process too, and the text of who holds each."""
        held = {}
        for path in sorted(self._directory.glob(f"{_PREFIX}*{_SUFFIX}")):
            with contextlib.suppress(
                OSError
            ):  # not ours, or a link: `acquire` refuses such a directory with its reason
                descriptor = _open(path, os.O_RDWR)
                try:
                    if not _try_lock(descriptor, fcntl.LOCK_SH):
                        held[path.name[len(_PREFIX) : -len(_SUFFIX)]] = _read_owner(descriptor)
                finally:
                    os.close(descriptor)
        return held

    def _lock(self, uuid: str, owner: str) -> int:
        if "/" in uuid or "\0" in uuid:
            raise ValueError(f"{uuid!r} is no UUID of a GPU")
        descriptor = _open(self._directory / f"{_PREFIX}{uuid}{_SUFFIX}", os.O_RDWR | os.O_CREAT)
        try:
            _lock_past_probes(descriptor, uuid)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, " ".join(owner.split()).encode()[:_OWNER_BYTES], 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _make_directory(self) -> None:
        """Make it, or refuse one that another user made first in the shared temporary directory."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self._directory.lstat()
        except OSError as error:
            raise DeviceError(
                f"the directory of GPU locks can't be made: {error}. Set TMPDIR to a local one."
            ) from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise DeviceError(
                f"{self._directory} should hold the GPU locks and is not a directory that only this user can write to "
                f"(owner {found.st_uid}, mode {stat.filemode(found.st_mode)}). Remove it, or set TMPDIR."
            )


def default_lock_directory() -> Path:
    """Where all kernels of this user on this machine look: a folder in the temporary directory."""
    return Path(tempfile.gettempdir()) / f"air_nb-{os.getuid()}"


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_past_probes(descriptor: int, uuid: str) -> None:
    """Lock exclusively, or raise `Taken` if another run does.

    flock can't ask without locking, so `held_uuids` takes a shared lock for an instant. That must not pass for a run:
    if a shared lock is to be had, only such probes are in the way, and they are gone the next moment.
    """
    for _try in range(_PROBE_TRIES):
        if _try_lock(descriptor, fcntl.LOCK_EX):
            return
        if not _try_lock(descriptor, fcntl.LOCK_SH):
            break
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        time.sleep(_PROBE_PAUSE_S)
    raise Taken(uuid, _read_owner(descriptor))


def _read_owner(descriptor: int) -> str:
    """Empty for the instant between another run's lock and its text."""
    return os.pread(descriptor, _OWNER_BYTES, 0).decode(errors="replace") or "a run that is just starting"
