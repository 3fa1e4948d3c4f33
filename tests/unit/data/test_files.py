"""Finding the files of a dataset."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from air_nb.data.files import is_behind_network, list_files, resolve_root
from air_nb.errors import DataError


@pytest.fixture
def tree(tmp_path):
    for name in ("a.jpg", "b.txt", "sub/c.jpg", "sub/deep/d.jpg", ".hidden/e.jpg"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "tree"


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    for name in ("a.jpg", "b.txt", "sub/c.jpg", "sub/deep/d.jpg", ".hidden/e.jpg"):
        system.pipe(f"/tree/{name}", name.encode())
    yield "memory://tree"
    system.rm("/tree", recursive=True)


@pytest.mark.parametrize(
    "pattern,paths",
    [
        ("**", (".hidden/e.jpg", "a.jpg", "b.txt", "sub/c.jpg", "sub/deep/d.jpg")),
        ("*", ("a.jpg", "b.txt")),
        ("*.jpg", ("a.jpg",)),
        ("**/*.jpg", (".hidden/e.jpg", "a.jpg", "sub/c.jpg", "sub/deep/d.jpg")),
        ("sub/*", ("sub/c.jpg",)),
        ("sub/**", ("sub/c.jpg", "sub/deep/d.jpg")),
        ("*/*.jpg", (".hidden/e.jpg", "sub/c.jpg")),
        ("[ab].*", ("a.jpg", "b.txt")),
    ],
)
def test_patterns_mean_the_same_for_directories_and_urls(tree, memory, pattern, paths):
    assert list_files(tree, pattern).paths == paths
    assert list_files(memory, pattern).paths == paths
    assert list_files(f"file://{tree}", pattern).paths == paths


def test_versions_change_with_the_content(tree, memory):
    for root, change in ((tree, _change_file), (memory, _change_object)):
        before = list_files(root)
        assert list_files(root).hash == before.hash
        change(root)
        assert list_files(root).hash != before.hash


def _change_file(tree: Path) -> None:
    os.utime(tree / "a.jpg", ns=(1, 1))


def _change_object(_url: str) -> None:
    fsspec.filesystem("memory").pipe("/tree/a.jpg", b"A.JPG")


def test_links_are_followed_but_not_in_circles(tree, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.jpg").write_text("x")
    (tree / "link").symlink_to(tmp_path / "elsewhere")
    (tree / "sub" / "up").symlink_to(tree)
    assert list_files(tree, "**/*.jpg").paths == (
        *(".hidden/e.jpg", "a.jpg", "link/x.jpg", "sub/c.jpg", "sub/deep/d.jpg"),
    )


def test_what_is_wrong_with_a_root_is_said(tree, memory, tmp_path):
    (tmp_path / "empty").mkdir()
    bad = {
        tmp_path / "nowhere": ("nowhere", "No such file"),
        tree / "a.jpg": ("a.jpg is a file", f"{str(tree)!r}", "pattern='a.jpg'"),
        tmp_path / "empty": ("no file matches '**'", str(tmp_path / "empty")),
        "memory://nowhere": ("nowhere", "check the URL"),
        "memory://tree/a.jpg": ("a.jpg is a file",),
        "unknown-protocol://x": ("unknown-protocol", "can't be listed"),
    }
    for root, texts in bad.items():
        with pytest.raises(DataError) as caught:
            list_files(root)
        assert all(text in str(caught.value) for text in texts), str(caught.value)
    for root in (tree, memory):
        with pytest.raises(DataError, match=r"no file matches '\*\.png' below .*tree"):
            list_files(root, "*.png")


def test_a_broken_link_is_not_silently_left_out(tree):
    (tree / "broken.jpg").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"broken\.jpg can't be read .* part of the dataset"):
        list_files(tree)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_a_directory_that_may_not_be_read_is_named(tree):
    for directory in (tree.parent, *tree.parents):
        if directory.stat().st_uid == 0 and directory.is_relative_to("/tmp"):
            directory.chmod(directory.stat().st_mode | 0o755)
    (tree / "sub").chmod(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(DataError, match="sub can't be read"):
            list_files(tree)
    finally:
        os.seteuid(0)


def test_volumes_are_where_the_variable_says(tree, memory, monkeypatch):
    assert not Path("/Volumes").exists()
    monkeypatch.setenv("AIR_NB_VOLUMES", str(tree.parent))
    assert resolve_root("/Volumes/tree/sub") == str(tree / "sub")
    assert list_files("/Volumes/tree", "*").paths == ("a.jpg", "b.txt")
    monkeypatch.setenv("AIR_NB_VOLUMES", "memory://")
    assert list_files("/Volumes/tree", "*").root == "memory://tree"
    monkeypatch.delenv("AIR_NB_VOLUMES")
    with pytest.raises(DataError, match="set AIR_NB_VOLUMES"):
        resolve_root("/Volumes/tree")
    assert resolve_root("/Volumes2/x") == "/Volumes2/x"


@pytest.mark.parametrize(
    "kind,is_behind", [("ext4", False), ("fuseblk", False), ("fuse", True), ("fuse.rclone", True), ("nfs4", True)]
)
def test_mounts_that_reach_over_a_network(tree, monkeypatch, kind, is_behind):
    mount = SimpleNamespace(mountpoint=str(tree), fstype=kind)
    root = SimpleNamespace(mountpoint="/", fstype="overlay")
    monkeypatch.setattr("psutil.disk_partitions", lambda *, all: [mount, root])  # noqa: A006
    monkeypatch.setattr("air_nb.data.files.is_network_path", lambda path: kind == "nfs4")
    assert is_behind_network(str(tree / "sub")) is is_behind


def test_directories_of_a_disk_are_not_behind_a_network(tree):
    assert not is_behind_network(str(tree))
    assert is_behind_network("s3://bucket")
