"""Bundles are written whole or not at all, mapped privately, and damaged ones are recognised."""

from __future__ import annotations

import json
import os
import pickle
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from air_nb.protocol.bundle import Bundle, BundleError, StreamReader

_LARGE = 3 << 20  # above what is read instead of mapped


def _bundle(*buffers: bytes, stream: tuple[bytes, ...] = (b"stream",)) -> Bundle:
    return Bundle(stream, tuple(memoryview(buffer) for buffer in buffers))


def _contents(bundle: Bundle) -> tuple[bytes, list[bytes]]:
    return bundle.reader().read(), [bytes(buffer) for buffer in bundle.buffers]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stream=st.lists(st.binary(max_size=200), max_size=4),
    buffers=st.lists(st.one_of(st.binary(max_size=300), st.just(bytes(_LARGE))), max_size=4),
)
def test_comes_back_as_written(tmp_path, stream, buffers):
    bundle = _bundle(*buffers, stream=tuple(stream))
    bundle.write(tmp_path / "x")
    opened = Bundle.open(tmp_path / "x")
    assert _contents(opened) == (b"".join(stream), buffers)
    assert opened.nbytes == bundle.nbytes


@pytest.mark.parametrize("size", [10, _LARGE])
class TestOpened:
    def test_lives_on_without_its_file(self, tmp_path, size):
        _bundle(b"a" * size).write(tmp_path / "x")
        opened = Bundle.open(tmp_path / "x")
        (tmp_path / "x").unlink()
        assert opened.buffers[0] == b"a" * size

    def test_is_written_to_privately(self, tmp_path, size):
        _bundle(b"a" * size).write(tmp_path / "x")
        first, second = Bundle.open(tmp_path / "x"), Bundle.open(tmp_path / "x")
        first.buffers[0][0] = ord("b")
        assert bytes(second.buffers[0][:1]) == bytes(Bundle.open(tmp_path / "x").buffers[0][:1]) == b"a"

    def test_is_not_shared_with_a_fork(self, tmp_path, size):
        _bundle(b"a" * size).write(tmp_path / "x")
        opened = Bundle.open(tmp_path / "x")
        child = os.fork()
        if child == 0:
            opened.buffers[0][0] = ord("b")
            os._exit(0)
        os.waitpid(child, 0)
        assert opened.buffers[0][0] == ord("a")

    def test_buffers_are_aligned(self, tmp_path, size):
        numpy = pytest.importorskip("numpy")
        _bundle(b"a", b"b" * size, b"", b"c" * 65).write(tmp_path / "x")
        for buffer in Bundle.open(tmp_path / "x").buffers:
            assert numpy.frombuffer(buffer, dtype="u1").ctypes.data % 64 == 0 or not len(buffer)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_small_one_holds_no_descriptor(tmp_path):
    _bundle(b"a" * 1000).write(tmp_path / "x")
    before = _descriptors()
    opened = [Bundle.open(tmp_path / "x") for _ in range(5)]
    assert _descriptors() == before
    assert len(opened) == 5


def test_the_file_is_the_users_only(tmp_path):
    _bundle(b"a").write(tmp_path / "x")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    _bundle(b"old").write(tmp_path / "x")
    gone = memoryview(b"new")
    broken = Bundle((b"stream",), (gone,))
    gone.release()
    with pytest.raises(ValueError, match="released"):
        broken.write(tmp_path / "x")
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]
    assert _contents(Bundle.open(tmp_path / "x")) == (b"stream", [b"old"])


class TestDamaged:
    @pytest.mark.parametrize("size", [1, 10, _LARGE])
    def test_a_truncated_file_is_recognised(self, tmp_path, size):
        _bundle(b"a" * size).write(tmp_path / "x")
        whole = (tmp_path / "x").read_bytes()
        for length in [*range(min(len(whole), 400)), len(whole) - 1]:
            (tmp_path / "cut").write_bytes(whole[:length])
            with pytest.raises(BundleError, match="run the cell again"):
                Bundle.open(tmp_path / "cut")

    def test_bytes_too_many_are_recognised(self, tmp_path):
        _bundle(b"a").write(tmp_path / "x")
        (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes() + b"!")
        with pytest.raises(BundleError, match="is damaged"):
            Bundle.open(tmp_path / "x")

    def test_a_pickle_is_no_bundle(self, tmp_path):
        (tmp_path / "x").write_bytes(pickle.dumps([1, 2, 3], protocol=5) * 10)
        with pytest.raises(BundleError, match=r"is no air_nb bundle: it begins with b'\\x80\\x05"):
            Bundle.open(tmp_path / "x")

    def test_another_version_says_so(self, tmp_path: Path):
        _bundle(b"a").write(tmp_path / "x")
        header = json.dumps({"version": 1}).encode()
        newer = (tmp_path / "x").read_bytes().replace(header[:-1], header[:-1].replace(b"1", b"7"))
        (tmp_path / "x").write_bytes(newer)
        with pytest.raises(BundleError, match="has bundle format 7, this air_nb reads 1"):
            Bundle.open(tmp_path / "x")


def test_the_reader_serves_an_unpickler_across_pieces():
    whole = pickle.dumps(["a" * 100_000, list(range(1000))], protocol=5)
    reader = StreamReader((whole[:7], memoryview(whole[7:5000]), whole[5000:]))
    assert pickle.Unpickler(reader).load()[1][-1] == 999
    assert reader.at_end


def test_the_reader_reads_lines_and_pieces():
    reader = StreamReader((b"ab\ncd",))
    target = bytearray(1)
    assert reader.readinto(memoryview(target)) == 1
    assert (bytes(target), reader.readline(), reader.readline(), reader.readline()) == (b"a", b"b\n", b"cd", b"")
