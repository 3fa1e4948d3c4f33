"""Tensors cross the border without a copy, with their storages, strides and kinds."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from air_nb.errors import CaptureError
from air_nb.protocol.bundle import Bundle
from air_nb.protocol.pickling import Freezer, LimitError, freeze_values, thaw

torch = pytest.importorskip("torch")

_TENSORS = {
    "plain": lambda: torch.arange(6.0),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "strided view": lambda: torch.arange(20.0)[3::4],
    "expanded": lambda: torch.ones(1).expand(5),
    "scalar": lambda: torch.tensor(3),
    "empty": lambda: torch.empty(0, 3),
    "bool": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "uint16": lambda: torch.ones(4).to(torch.uint16),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "requires grad": lambda: torch.ones(2, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
}


def _through_a_file(tmp_path, **values):
    freeze_values(values).write(tmp_path / "x")
    return thaw(Bundle.open(tmp_path / "x"))


@pytest.mark.parametrize("make", _TENSORS.values(), ids=_TENSORS.keys())
def test_comes_back_equal(tmp_path, make):
    tensor = make()
    got = _through_a_file(tmp_path, x=tensor)["x"]
    assert type(got) is type(tensor)
    assert (got.dtype, got.shape, got.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
    if not tensor.is_sparse:
        assert got.stride() == tensor.stride()
    assert torch.equal(got.to(torch.complex64).to_dense(), tensor.to(torch.complex64).to_dense())


def test_a_meta_tensor_stays_one(tmp_path):
    got = _through_a_file(tmp_path, x=torch.empty(3, 2, device="meta"))["x"]
    assert (got.device.type, got.shape) == ("meta", (3, 2))


def test_views_over_several_names_share_their_storage(tmp_path):
    base = torch.zeros(1 << 18)
    freezer = Freezer()
    sizes = [
        freezer.add(name, value) for name, value in {"base": base, "view": base[2:], "other": base.view(2, -1)}.items()
    ]
    assert sizes[0] > 1 << 20
    assert max(sizes[1:]) < 300
    freezer.bundle().write(tmp_path / "x")
    got = thaw(Bundle.open(tmp_path / "x"))
    got["base"][2] = 7
    assert got["view"][0] == got["other"][0, 2] == 7
    assert base[2] == 0


def test_a_model_and_its_optimizer_stay_together(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[0].tied = model[0].weight
    got = _through_a_file(tmp_path, model=model, optimizer=torch.optim.Adam(model.parameters()))
    assert got["optimizer"].param_groups[0]["params"][0] is got["model"][0].weight is got["model"][0].tied
    got["model"](torch.ones(2, 3)).sum().backward()
    got["optimizer"].step()


def test_storages_themselves_can_be_sent(tmp_path):
    tensor = torch.arange(4, dtype=torch.uint8)
    got = _through_a_file(tmp_path, storage=tensor.untyped_storage(), tensor=tensor)
    got["tensor"][0] = 9
    assert got["storage"].tolist() == [9, 1, 2, 3]


def test_memory_is_referred_to_and_counted_but_not_copied():
    tensor = torch.zeros(1 << 20)
    freezer = Freezer()
    assert freezer.add("x", tensor) < (4 << 20) + 500
    (buffer,) = freezer.bundle().buffers
    tensor[0] = 1
    assert bytes(buffer[:4]) == b"\x00\x00\x80\x3f"
    with pytest.raises(LimitError):
        Freezer(limit_bytes=1000).add("x", tensor)


def test_a_text_beyond_the_limit_is_refused_before_it_is_copied():
    text = "x" * (32 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(LimitError):
            Freezer(limit_bytes=1000).add("text", text)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_default_device_does_not_matter(tmp_path):
    tensor = torch.ones(3)
    with torch.device("meta"):
        got = _through_a_file(tmp_path, x=tensor)["x"]
    assert torch.equal(got, tensor)
    assert not Freezer().moved_from_gpu


def test_a_model_in_its_process_group_says_what_to_send(monkeypatch):
    wrapped = object.__new__(torch.nn.parallel.DistributedDataParallel)
    with pytest.raises(Exception, match=r"Send its .module instead"):
        freeze_values({"model": wrapped})


def _backend(compiled):
    context = dict(zip(compiled.__code__.co_freevars, compiled.__closure__, strict=True))["self"].cell_contents
    backend = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


class TestCompiled:
    def test_a_compiled_function_is_compiled_again_by_the_same_backend(self):
        namespace: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
        exec("@torch.compile(backend='eager')\ndef double(x): return 2 * x", namespace)
        got = thaw(freeze_values({"f": namespace["double"]}))["f"]
        assert got is not namespace["double"]
        assert got(torch.ones(1)) == 2
        assert _backend(got).compiler_fn is _backend(namespace["double"]).compiler_fn

    def test_one_that_torch_wraps_in_another_way_says_what_to_do(self):
        def wrapper():
            """As a later torch may make it."""

        wrapper.__dict__["_torchdynamo_orig_callable"] = len
        with pytest.raises(CaptureError, match=r"a compiled function\. Call torch\.compile"):
            freeze_values({"f": wrapper})
