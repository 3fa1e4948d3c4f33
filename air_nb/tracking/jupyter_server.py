"""Finds the Jupyter server that started this kernel, if a page of it can open MLflow for us.

It can if jupyter-server-proxy and air_nb were installed in *its* environment when it started, which may be another one
than the kernel's. It isn't asked: a server that is busy would keep the kernel waiting. What it left on disk tells.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from air_nb.tracking.links import OPENER, JupyterServer

__all__ = ["find_jupyter_server"]

_SITE_PACKAGES = re.compile(rb" (/[^\n]*?/(?:site|dist)-packages)/")


def find_jupyter_server() -> JupyterServer | None:
    """The server of this kernel; None without one, and if it has no opener: a link must open.

    Takes a few milliseconds and imports nothing that a kernel has not imported.
    """
    pid = os.environ.get("JPY_PARENT_PID", "")  # set by jupyter_client; the parent's own pid may be that of a wrapper
    if not pid.isdecimal():
        return None
    from jupyter_core.paths import jupyter_runtime_dir

    file = Path(jupyter_runtime_dir()) / f"jpserver-{pid}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        info = json.loads(file.read_text(encoding="utf-8"))
        if _has_opener(int(pid), file.stat().st_mtime):
            # What a hub is called from outside is known to the hub alone.
            url = os.environ.get("JUPYTERHUB_PUBLIC_URL") or info["url"]
            return JupyterServer(info["base_url"], url.rstrip("/") + "/")
    return None


def _has_opener(pid: int, started_at: float) -> bool:
    """Whether both packages were there when the server started; entry points are read at no other time."""
    sites = _site_packages(pid)
    proxies = [info for site in sites for info in site.glob("jupyter_server_proxy-*.*-info")]
    openers = [info for site in sites for info in site.glob("air_nb-*.*-info") if _names_opener(info)]
    return all(any(info.stat().st_mtime <= started_at for info in infos) for infos in (proxies, openers))


def _names_opener(info: Path) -> bool:
    with suppress(OSError):
        return OPENER in (info / "entry_points.txt").read_text(encoding="utf-8")
    return False


def _site_packages(pid: int) -> list[Path]:
    """Where a process has loaded its compiled modules from; every Jupyter server has some (tornado's, pyzmq's)."""
    maps = Path(f"/proc/{pid}/maps").read_bytes()
    return [Path(os.fsdecode(site)) for site in sorted(set(_SITE_PACKAGES.findall(maps)))]
