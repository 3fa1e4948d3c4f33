"""``.metadata`` is a pickle: what torch writes is read, what a stranger may have put into one is not run."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from air_nb.checkpoint import restricted
from air_nb.checkpoint.restricted import Entry, load_layout, load_metadata
from air_nb.errors import CheckpointDamagedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What torch writes for all that it knows: many types, no tensors, nested containers, a path in it."""
    path = tmp_path_factory.mktemp("torch")
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint16, torch.bool, torch.complex64)
    state = {
        "model": {f"t.{dtype}": torch.zeros(2, 3, dtype=dtype) for dtype in dtypes},
        "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0, 4),
        "step": 3,
        "list": [1, "x", torch.ones(2)],
        "set": {1, 2},
    }
    dcp_save(state, checkpoint_id=path)
    return (path / ".metadata").read_bytes()


def test_it_is_equal_to_what_torch_itself_unpickles(saved):
    theirs, ours = pickle.loads(saved), load_metadata(saved)
    theirs.storage_meta.checkpoint_id = str(theirs.storage_meta.checkpoint_id)  # a path comes as text
    assert ours == theirs
    assert {key: hash(key) for key in ours.storage_data} == {key: hash(key) for key in theirs.storage_data}
    assert all(type(key.offset) is torch.Size for key in ours.storage_data if key.offset is not None)


def test_shards_of_many_ranks_come_back_too():
    tensor = torch_metadata.TensorStorageMetadata(
        torch_metadata.TensorProperties(torch.bfloat16, memory_format=torch.channels_last, requires_grad=True),
        torch.Size([4, 2]),
        [torch_metadata.ChunkStorageMetadata(torch.Size([2 * i, 0]), torch.Size([2, 2])) for i in range(2)],
    )
    metadata = torch_metadata.Metadata(
        {"w": tensor},
        storage_data={
            torch_metadata.MetadataIndex("w", [2 * i, 0], i): _StorageInfo(f"__{i}_0.distcp", 10, 20, ["zstd"])
            for i in range(2)
        },
        storage_meta=torch_metadata.StorageMeta(),
    )
    content = pickle.dumps(metadata)
    assert load_metadata(content) == metadata
    layout = load_layout(content)
    assert layout.entries == {"w": Entry((4, 2), "bfloat16", 2)}
    assert layout.file_sizes_bytes == {"__0_0.distcp": 30, "__1_0.distcp": 30}


def test_the_layout_needs_no_torch(saved, tmp_path):
    (tmp_path / "metadata").write_bytes(saved)
    program = (
        "import sys, pathlib; from air_nb.checkpoint.restricted import load_layout\n"
        f"layout = load_layout(pathlib.Path({str(tmp_path / 'metadata')!r}).read_bytes())\n"
        "print(layout.entries['model.t.torch.bfloat16'], layout.entries['step'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    expected = f"{Entry((2, 3), 'bfloat16', 1)} {Entry(None, None, 1)} False"
    assert done.stdout.strip() == expected


class _Runs:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "call",
    [
        (os.system, "true"),
        (eval, "1"),
        (exec, "1"),
        (getattr, "", "join"),
        (torch.load, "x"),
        (subprocess.Popen, ["true"]),
        (__import__, "os"),
        (pickle.loads, b"N."),
        (torch.hub.load, "x", "y"),
    ],
    ids=lambda call: call[0].__name__,
)
@pytest.mark.parametrize("load", [load_layout, load_metadata])
def test_a_pickle_that_wants_to_run_something_is_refused_by_name(call, load):
    metadata = torch_metadata.Metadata({}, planner_data=_Runs(*call))
    with pytest.raises(CheckpointDamagedError) as caught:
        load(pickle.dumps(metadata))
    assert call[0].__name__ in str(caught.value)
    assert "FileSystemReader" in str(caught.value)


def _build(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def _global(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


@pytest.mark.parametrize("name", ["Metadata", "MetadataIndex", "_MEM_FORMAT_ENCODING", "TensorProperties"])
def test_a_pickle_can_not_change_the_classes_that_it_may_name(name):
    # BUILD with a state (None, {"x": 1}) sets attributes on whatever is on the stack: here a class.
    content = _build(_global("torch.distributed.checkpoint.metadata", name), b"(N}\x8c\x01xK\x01st", b"b")
    with pytest.raises(CheckpointDamagedError):
        load_metadata(content)
    stand_in = restricted._ALLOWED["torch.distributed.checkpoint.metadata", name]
    assert not hasattr(stand_in, "x")


def test_a_name_of_torch_that_only_looks_like_a_dtype_is_refused():
    content = pickle.dumps(torch_metadata.Metadata({"w": torch_metadata.BytesStorageMetadata()}))
    assert load_metadata(content).state_dict_metadata.keys() == {"w"}
    tensor = torch_metadata.TensorStorageMetadata(torch_metadata.TensorProperties(torch.float32), torch.Size([1]), [])
    content = pickle.dumps(torch_metadata.Metadata({"w": tensor}), protocol=2)
    assert b"ctorch\nfloat32\n" in content
    with pytest.raises(CheckpointDamagedError, match="float_power"):
        load_metadata(content.replace(b"ctorch\nfloat32\n", b"ctorch\nfloat_power\n"))
    with pytest.raises(CheckpointDamagedError, match=r"torch\.load"):
        load_layout(content.replace(b"ctorch\nfloat32\n", b"ctorch\nload\n"))


def test_no_flipped_bit_or_lost_byte_raises_anything_but_damage(saved):
    chance = random.Random(0)
    for _ in range(300):
        content = bytearray(saved)
        if chance.random() < 0.2:
            del content[chance.randrange(len(content)) :]
        else:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        for load in (load_layout, load_metadata):
            with contextlib.suppress(CheckpointDamagedError):
                load(bytes(content))


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", pickle.dumps({}), b"PK\x03\x04"])
def test_what_is_no_metadata_is_damage(content):
    with pytest.raises(CheckpointDamagedError):
        load_layout(content)


def test_paths_of_newer_pythons_are_known():
    content = pickle.dumps(
        torch_metadata.Metadata({}, storage_meta=torch_metadata.StorageMeta(Path("/a/b"))), protocol=2
    )
    assert load_metadata(content).storage_meta == torch_metadata.StorageMeta("/a/b")
    renamed = content.replace(b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath")
    assert load_metadata(renamed).storage_meta == torch_metadata.StorageMeta("/a/b")
