"""Lists and downloads through fsspec: the only module of the data package that speaks to a storage service.

File systems are made anew for each call (fsspec keeps them, by process): a connection must not cross a fork.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec.asyn
import fsspec.core

from air_nb.data.fetch import Retries, retrying
from air_nb.data.manifest import Entry
from air_nb.errors import DataError

__all__ = ["download", "find"]

# What the back ends call the etag, and the time of the last change where there is none.
_VERSION_KEYS = (
    *("ETag", "etag", "e_tag", "md5Hash", "content_md5", "Content-MD5"),
    *("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "modified", "created"),
)
_STAT_THREADS = 16
_LISTING_RETRIES = Retries()


def find(root: str, depth: int | None, options: Mapping[str, Any]) -> Iterator[tuple[str, int, str]]:
    """The files below a URL as (path below it, size in bytes, version).

    Args:
        root: A URL.
        depth: How many levels of directories, None for all.
        options: Of fsspec's file system.

    Raises:
        DataError: No such root, a file, not reachable, or a server that does not tell sizes.
    """
    try:
        system, base = fsspec.core.url_to_fs(root, **options)
        infos = retrying(
            f"listing {root}", lambda: _infos(system, base, depth), _LISTING_RETRIES, on_retry=lambda: None
        )
    except DataError:
        raise
    except Exception as error:  # fsspec's back ends raise what they like
        msg = f"{root} can't be listed: {type(error).__name__}: {error}. Check the URL, the network and the credentials"
        raise DataError(msg) from error
    prefix = base.rstrip("/") + "/" if base else ""
    for name, info in infos.items():
        if info["size"] is None:
            msg = (
                f"{name}: the server does not tell its size, so that a download can't be checked; copy the files first"
            )
            raise DataError(msg)
        yield name.removeprefix(prefix).lstrip("/"), int(info["size"]), _version(info)


def _infos(system: Any, base: str, depth: int | None) -> dict[str, dict[str, Any]]:
    is_listed_by_links = "http" in system.protocol  # every page looks like a file there
    if not is_listed_by_links and system.isfile(base):
        msg = f"{base} is a file: give the directory that it is in, and its name as the pattern"
        raise DataError(msg)
    if base and not system.exists(base):
        msg = f"there is no {base} on {type(system).__name__}: check the URL"
        raise DataError(msg)
    found: dict[str, dict[str, Any]] = system.find(base, maxdepth=depth, detail=True)
    files = {
        name: info
        for name, info in found.items()
        if info["type"] == "file" and not name.endswith("/") and not (is_listed_by_links and "?" in name)
    }
    unknown = [name for name, info in files.items() if info.get("size") is None]  # HTTP: a listing is only links
    if unknown:
        system.invalidate_cache()
        with ThreadPoolExecutor(_STAT_THREADS, thread_name_prefix="air_nb-stat") as pool:
            files.update(zip(unknown, pool.map(system.info, unknown), strict=True))
    return files


def _version(info: Mapping[str, Any]) -> str:
    return next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")


def download(entry: Entry, target: Path, options: Mapping[str, Any], *, timeout_s: float) -> None:
    """Write a file's content to a path of this machine, once, without retries.

    Args:
        entry: A file behind a URL, or of a mount.
        target: An existing file; its content is replaced, the file itself stays.
        options: Of fsspec's file system.
        timeout_s: Bound where the back end is asynchronous (HTTP, S3, GCS, Azure): it is cancelled then.

    Raises:
        OSError: The size is not that of the listing.
        Exception: What the back end raises.
    """
    if "://" not in entry.url:
        shutil.copyfile(entry.url, target)
    else:
        system, path = fsspec.core.url_to_fs(entry.url, **options)
        if isinstance(system, fsspec.asyn.AsyncFileSystem):
            get_file = system._get_file  # noqa: SLF001 - what fsspec documents as the coroutine of get_file
            fsspec.asyn.sync(system.loop, get_file, path, str(target), timeout=timeout_s)
        else:
            system.get_file(path, str(target))
    size_bytes = target.stat().st_size
    if size_bytes != entry.size_bytes:
        msg = f"{size_bytes:,} bytes came, and it had {entry.size_bytes:,} when it was listed"
        raise OSError(msg)  # worth another attempt: most often the connection was cut
