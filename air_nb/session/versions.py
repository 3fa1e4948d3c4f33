"""The oldest versions that air_nb works with (pure)."""

from __future__ import annotations

import re

__all__ = ["MINIMUM_VERSIONS", "is_too_old", "minimum_text"]

MINIMUM_VERSIONS = {
    "ipython": (9, 0),
    "ipykernel": (7, 1),
    "jupyterlab": (4, 4),
    "ipywidgets": (8, 0),
    "torch": (2, 11),
}


def is_too_old(distribution: str, found: str) -> bool:
    """Whether a version (``"2.13.0+cpu"``, ``"9.0rc1"``) is below the minimum."""
    return tuple(map(int, re.findall(r"\d+", found)[:2])) < MINIMUM_VERSIONS[distribution]


def minimum_text(distribution: str) -> str:
    """Such as ``"9.0"``."""
    return ".".join(map(str, MINIMUM_VERSIONS[distribution]))
