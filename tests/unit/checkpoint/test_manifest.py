"""The manifest as a file, and the digests in it."""

from __future__ import annotations

import builtins
import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_nb.checkpoint.manifest import FORMAT_VERSION, Digest, FileRecord, Manifest, record_of, versions
from air_nb.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError


def make_manifest(**changes) -> Manifest:
    values = {
        "step": 7,
        "created_at": 1.5,
        "world_size": 2,
        "files": {"__0_0.distcp": FileRecord(3, "crc32", "00000001")},
        "data": {"epoch": 1},
    }
    return Manifest(**{**values, **changes})


def test_what_was_encoded_comes_back():
    manifest = make_manifest(run_id="r", run_name="n", mlflow_run_id="m", extra={"lr": [1, None]}, versions=versions())
    assert Manifest.decode(manifest.encode()) == manifest
    assert manifest.size_bytes() == 3


def test_a_newer_format_is_named_as_such_whatever_it_holds():
    newer = json.dumps({"format_version": FORMAT_VERSION + 1, "files": "elsewhere"}).encode()
    with pytest.raises(CheckpointMismatchError) as caught:
        Manifest.decode(newer)
    assert f"version {FORMAT_VERSION + 1}" in str(caught.value)
    assert "update air_nb" in str(caught.value)


def test_a_field_that_a_later_air_nb_added_is_passed_over():
    values = json.loads(make_manifest().encode())
    values["colour"] = "blue"
    assert Manifest.decode(json.dumps(values).encode()) == make_manifest()


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"[]", b"{}", b"null", b'{"format_version": 1}', b'{"format'])
def test_what_is_no_manifest_is_damage_and_no_key_error(content):
    with pytest.raises(CheckpointDamagedError):
        Manifest.decode(content)


@given(st.integers(min_value=0, max_value=2000), st.data())
def test_a_flipped_bit_never_raises_anything_but_our_errors(position, data):
    content = bytearray(make_manifest().encode())
    content[position % len(content)] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(CheckpointDamagedError, CheckpointMismatchError):
        Manifest.decode(bytes(content))


@given(st.lists(st.binary(max_size=50)), st.sampled_from(["crc32", "xxh3_128"]))
def test_a_digest_does_not_depend_on_the_pieces(pieces, algorithm):
    if algorithm == "xxh3_128":
        pytest.importorskip("xxhash")
    digest = Digest(algorithm)
    for piece in pieces:
        digest.update(memoryview(piece))
    assert digest.record() == record_of(b"".join(pieces), algorithm)
    assert digest.record().size_bytes == sum(map(len, pieces))


def test_the_digests_are_those_of_the_algorithms_that_they_are_named_after():
    assert record_of(b"123456789", "crc32").digest == "cbf43926"
    pytest.importorskip("xxhash")
    assert record_of(b"", "xxh3_128").digest == "99aa06d3014798d86001c324468d497f"


def test_without_xxhash_crc32_is_written_and_xxh3_is_refused_with_the_way_out(monkeypatch):
    original = builtins.__import__

    def without_xxhash(name, *args, **kwargs):
        if name == "xxhash":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_xxhash)
    assert record_of(b"abc").algorithm == "crc32"
    with pytest.raises(CheckpointError, match="pip install xxhash"):
        record_of(b"abc", "xxh3_128")


def test_an_unknown_algorithm_is_a_newer_air_nb():
    with pytest.raises(CheckpointMismatchError, match="sha9"):
        record_of(b"abc", "sha9")


def test_data_that_json_has_no_word_for_is_refused_when_it_is_saved():
    with pytest.raises(TypeError):
        make_manifest(data={"x": object()}).encode()
