"""Finds the files of a dataset: below a directory of this machine, a mount, or a URL that fsspec knows.

Loads no torch. ``/Volumes/...`` is looked up in ``AIR_NB_VOLUMES`` where the machine has no such directory.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from fsspec.utils import glob_translate

from air_nb.data.manifest import Manifest, join
from air_nb.errors import DataError
from air_nb.runs.paths import is_network_path

__all__ = ["is_behind_network", "is_url", "list_files", "resolve_root"]

_VOLUMES = "/Volumes"


def resolve_root(root: str | os.PathLike[str]) -> str:
    """The absolute directory or the URL that a user's path means.

    Raises:
        DataError: The path is below ``/Volumes``, there is none here, and ``AIR_NB_VOLUMES`` is not set.
    """
    text = os.fspath(root)
    if (text + "/").startswith(_VOLUMES + "/") and not Path(_VOLUMES).is_dir():
        volumes = os.environ.get("AIR_NB_VOLUMES")
        if not volumes:
            msg = (
                f"{text}: this machine has no {_VOLUMES}; set AIR_NB_VOLUMES to the directory or URL that stands for it"
            )
            raise DataError(msg)
        text = join(volumes, text.removeprefix(_VOLUMES).lstrip("/"))
    text = text.removeprefix("file://")
    # Absolute, because a loader worker or a rank may have another working directory.
    return text if is_url(text) else str(Path(text).expanduser().absolute())


def is_url(root: str) -> bool:
    """Whether a root is a URL, not a path of this machine."""
    return "://" in root or "::" in root


def is_behind_network(root: str) -> bool:
    """Whether reading below this root crosses a network: URLs, network file systems and FUSE mounts."""
    return is_url(root) or is_network_path(Path(root)) or re.match(r"fuse(\.|$)", _file_system(Path(root))) is not None


def _file_system(path: Path) -> str:
    """Kind of the file system that a path is on, as in the mount table; empty if unknown."""
    resolved = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if resolved.is_relative_to(mount.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""


def list_files(
    root: str | os.PathLike[str], pattern: str = "**", *, storage_options: Mapping[str, Any] | None = None
) -> Manifest:
    """List the files below a root whose names match a pattern.

    Args:
        root: A directory, or any URL that fsspec knows.
        pattern: Which files, by their names below the root: ``*.jpg`` those of the root itself, ``**/*.jpg`` those at
            any depth, ``train/**`` all below ``train``. Hidden files match like any other.
        storage_options: What fsspec's file system takes: credentials, an endpoint.

    Raises:
        DataError: There is no such root, it is a file, it can't be read, or no file matches.
        ValueError: The pattern is malformed.
    """
    where = resolve_root(root)
    expression = re.compile(glob_translate(pattern))
    depth = None if "**" in pattern else pattern.count("/") + 1
    if is_url(where):
        from air_nb.data.remote import find  # what a directory does not need

        found = find(where, depth, storage_options or {})
    else:
        found = _find_local(Path(where), depth)
    manifest = Manifest.of(where, pattern, (file for file in found if expression.match(file[0])))
    if not manifest:
        msg = f"no file matches {pattern!r} below {where}: check both ('**' is every file at any depth)"
        raise DataError(msg)
    return manifest


def _find_local(root: Path, depth: int | None) -> Iterator[tuple[str, int, str]]:
    try:
        status = root.stat()
    except OSError as error:
        msg = f"{root} can't be listed ({error.strerror}): check the path; it must be a directory of this machine"
        raise DataError(msg) from error
    if not stat.S_ISDIR(status.st_mode):
        msg = f"{root} is a file: give its directory {str(root.parent)!r}, and pattern={root.name!r}"
        raise DataError(msg)
    return _walk(root, "", depth, frozenset({(status.st_dev, status.st_ino)}))


def _walk(
    root: Path, below: str, depth: int | None, parents: frozenset[tuple[int, int]]
) -> Iterator[tuple[str, int, str]]:
    """The files of a directory as (path, size, time of the last change); links are followed, in circles too."""
    directory = root / below
    try:
        with os.scandir(directory) as listing:
            entries = [(entry.name, entry.stat()) for entry in listing]
    except OSError as error:
        msg = f"{error.filename or directory} can't be read ({error.strerror}): it is part of the dataset {root}"
        raise DataError(msg) from error
    for name, status in entries:
        if stat.S_ISREG(status.st_mode):
            yield below + name, status.st_size, str(status.st_mtime_ns)
        elif stat.S_ISDIR(status.st_mode) and depth != 1:
            identity = (status.st_dev, status.st_ino)
            if identity not in parents:
                yield from _walk(root, f"{below}{name}/", depth and depth - 1, parents | {identity})
