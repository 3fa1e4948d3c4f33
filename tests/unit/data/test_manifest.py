"""The list of a dataset's files."""

from __future__ import annotations

import pickle

from air_nb.data.manifest import Manifest, join

_FILES = [("b", 2, "v"), ("a", 1, "v")]


def test_is_sorted_and_gives_entries_with_their_place():
    manifest = Manifest.of("s3://bucket/train", "**", _FILES)
    assert manifest.paths == ("a", "b")
    assert [entry.url for entry in manifest] == ["s3://bucket/train/a", "s3://bucket/train/b"]
    assert (manifest[1].path, manifest[1].size_bytes, manifest.total_bytes) == ("b", 2, 3)


def test_hash_tells_names_sizes_and_versions_but_not_where_they_are():
    manifest = Manifest.of("/here", "**", _FILES)
    assert manifest.hash == Manifest.of("/there", "*", reversed(_FILES)).hash
    others = [
        [("b", 2, "v")],
        [("b", 3, "v"), ("a", 1, "v")],
        [("b", 2, "w"), ("a", 1, "v")],
        [("c", 2, "v"), ("a", 1, "v")],
    ]
    assert len({manifest.hash, *(Manifest.of("/here", "**", files).hash for files in others)}) == 5


def test_prefix_hash_tells_appended_files_from_changed_ones():
    before = Manifest.of("/here", "**", _FILES)
    appended = Manifest.of("/here", "**", [*_FILES, ("c", 3, "v")])
    changed = Manifest.of("/here", "**", [("b", 2, "w"), ("a", 1, "v"), ("c", 3, "v")])
    assert appended.prefix_hash(2) == before.hash
    assert changed.prefix_hash(2) != before.hash


def test_pickles():
    manifest = Manifest.of("/here", "**", _FILES)
    assert pickle.loads(pickle.dumps(manifest)) == manifest


def test_names_below_a_root():
    assert join("/data", "a") == "/data/a"
    assert join("http://host/", "a/b") == "http://host/a/b"
    assert join("zip://train::s3://bucket/x.zip", "a") == "zip://train/a::s3://bucket/x.zip"
