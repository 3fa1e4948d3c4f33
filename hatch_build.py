"""Build hook of the wheel: puts the prebuilt JupyterLab extension together. No node, no bundler.

Sources are ``jupyter-config/labextension/`` and the panel's own files; see ``jupyter-config/README.md``. The names
of the files in ``static/`` carry the hash of their content: browsers keep what they have fetched, so a new version must
have a new name.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["INSTALLED_AT", "LabextensionHook", "build_labextension"]

INSTALLED_AT = "share/jupyter/labextensions/air-nb"
_PANEL_FILES = ("panel.js", "panel.css")


class LabextensionHook(BuildHookInterface[Any]):
    """Adds the extension to the wheel, an editable one too, as a file of the environment rather than of the package."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the build."""
        del version
        self._folder = tempfile.TemporaryDirectory(prefix="air-nb-labextension-")
        target = Path(self._folder.name)
        build_labextension(Path(self.root), target, version=self.metadata.version)
        build_data["shared_data"][str(target)] = INSTALLED_AT

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """After it."""
        del version, build_data, artifact_path
        self._folder.cleanup()


def build_labextension(root: Path, target: Path, *, version: str) -> None:
    """Write the extension's folder.

    Args:
        root: The checkout.
        target: An empty folder.
        version: Of the package.
    """
    source = root / "jupyter-config" / "labextension"
    static = target / "static"
    static.mkdir(parents=True)
    entry = (source / "remoteEntry.js").read_text(encoding="utf-8")
    for name in _PANEL_FILES:
        text = (root / "air_nb" / "sidebar" / "static" / name).read_text(encoding="utf-8")
        entry = entry.replace(f"{{{name}}}", _write_hashed(static, name, text))
    package = json.loads((source / "package.json").read_text(encoding="utf-8"))
    package["version"] = version
    package["jupyterlab"]["_build"]["load"] = f"static/{_write_hashed(static, 'remoteEntry.js', entry)}"
    (target / "package.json").write_text(json.dumps(package, indent=2) + "\n", encoding="utf-8")
    (target / "install.json").write_bytes((source / "install.json").read_bytes())


def _write_hashed(folder: Path, name: str, text: str) -> str:
    """Write a file; returns its name, such as ``panel.0123456789abcdef.js``."""
    data = text.encode()
    stem, _, suffix = name.rpartition(".")
    hashed = f"{stem}.{hashlib.sha256(data).hexdigest()[:16]}.{suffix}"
    (folder / hashed).write_bytes(data)
    return hashed
