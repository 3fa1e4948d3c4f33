"""The JupyterLab extension as the wheel carries it: names that change with the content, files that Jupyter finds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

from hatch_build import INSTALLED_AT, build_labextension

_ROOT = Path(__file__).parents[2]
_SOURCES = ("jupyter-config/labextension", "air_nb/sidebar/static")


def _build(root: Path, target: Path) -> dict[str, str]:
    """The files of the extension, by name."""
    build_labextension(root, target, version="1.2.3")
    files = (file for file in target.rglob("*") if file.is_file())
    return {file.relative_to(target).as_posix(): file.read_text(encoding="utf-8") for file in files}


def _names(files: dict[str, str]) -> dict[str, str]:
    """Hashed names by the names of their sources, such as ``panel.js``."""
    parts = [(name.split("/")[-1].split("."), name) for name in files if name.startswith("static/")]
    return {f"{stem}.{suffix}": name for (stem, _, suffix), name in parts}


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of the sources, to change."""
    copy = Path(tmp_path) / "checkout"
    for each in _SOURCES:
        shutil.copytree(_ROOT / each, copy / each)
    return copy


def test_jupyter_finds_the_entry_and_the_entry_finds_the_panel(tmp_path):
    files = _build(_ROOT, tmp_path / "built")
    names = _names(files)
    package = json.loads(files["package.json"])
    assert package["name"] == "air-nb"
    assert package["version"] == "1.2.3"
    assert package["jupyterlab"]["_build"] == {"load": names["remoteEntry.js"], "extension": "./extension"}
    entry = files[names["remoteEntry.js"]]
    assert f"'{Path(names['panel.js']).name}'" in entry
    assert f"'{Path(names['panel.css']).name}'" in entry
    assert "{panel" not in entry
    assert files[names["panel.js"]] == (_ROOT / "air_nb/sidebar/static/panel.js").read_text(encoding="utf-8")
    assert json.loads(files["install.json"])["packageName"] == "air_nb"


@pytest.mark.parametrize("changed", ["panel.js", "panel.css", "remoteEntry.js"])
def test_a_file_that_changes_has_a_new_name_and_so_has_the_entry(checkout, tmp_path, changed):
    before = _names(_build(checkout, tmp_path / "before"))
    assert _names(_build(checkout, tmp_path / "again")) == before
    (source,) = checkout.rglob(changed)
    source.write_text(source.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    after = _names(_build(checkout, tmp_path / "after"))
    assert {name for name in before if before[name] != after[name]} == {changed, "remoteEntry.js"}


def test_the_wheel_carries_the_extension_and_the_panel_for_widgets(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (package,) = (name for name in names if name.endswith(f".data/data/{INSTALLED_AT}/package.json"))
        load = json.loads(archive.read(package))["jupyterlab"]["_build"]["load"]
    folder = package.removesuffix("package.json")
    assert f"{folder}{load}" in names
    assert sum(name.startswith(folder) for name in names) == 5
    assert {"air_nb/sidebar/static/panel.js", "air_nb/sidebar/static/panel.css"} <= set(names)
    assert not any("hatch_build" in name or name.startswith("jupyter-config") for name in names)


def test_the_installed_extension_is_that_of_this_checkout(tmp_path):
    installed = Path(sys.prefix) / INSTALLED_AT
    expected = _names(_build(_ROOT, tmp_path / "built"))
    found = {f"static/{file.name}" for file in (installed / "static").glob("*")}
    again = f"the extension in {installed} is another one: run `pip install --no-deps --editable .` again"
    assert found == set(expected.values()), again
    assert json.loads((installed / "package.json").read_text())["version"] == distribution("air_nb").version
