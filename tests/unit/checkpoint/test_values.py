"""Values that are no tensors of the model."""

from __future__ import annotations

import collections
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from air_nb.checkpoint.values import decode, encode, freeze, thaw


def there_and_back(value):
    return thaw(decode(encode(freeze(value, "value"))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2.5,
        float("inf"),
        1 + 2j,
        "text",
        b"bytes",
        [1, (2, [3])],
        {"a": {1: 2, (3, "b"): None}},
        {1, 2},
        collections.OrderedDict(b=1, a=2),
        collections.Counter({4: 2, 8: 1}),
        torch.float16,
        torch.device("cpu"),
        torch.Size([2, 3]),
        [],
        {},
    ],
)
def test_plain_values_come_back_with_their_types(value):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool])
def test_tensors_come_back(dtype):
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    back = there_and_back({"x": tensor})["x"]
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("value", [np.float64(0.1), np.int32(7), np.arange(6).reshape(2, 3), np.array(["a", "bc"])])
def test_numpy_values_come_back_as_such(value):
    back = there_and_back([value])[0]
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert np.array_equal(back, value)


def test_a_frozen_value_is_a_copy():
    tensor, array, values = torch.zeros(2), np.zeros(2), [1]
    frozen = freeze([tensor, array, values], "value")
    tensor += 1
    array += 1
    values.append(2)
    back = thaw(frozen)
    assert back[0].tolist() == [0, 0]
    assert back[1].tolist() == [0, 0]
    assert back[2] == [1]


@dataclasses.dataclass
class Own:
    number: int


@pytest.mark.parametrize(
    "value,where",
    [
        (lambda: 0, "state.a[1]"),
        (Own(1), "state.a[1]"),
        (np.array([Own(1)], dtype=object), "state.a[1]"),
        (collections.deque(), "state.a[1]"),
        (open, "state.a[1]"),
    ],
)
def test_what_could_not_be_read_back_is_refused_by_its_name(value, where):
    with pytest.raises(TypeError) as caught:
        freeze({"a": [0, value]}, "state")
    assert str(caught.value).startswith(where)


def test_a_class_that_the_user_allows_is_saved_and_restored():
    with torch.serialization.safe_globals([Own]):
        assert there_and_back(Own(5)) == Own(5)


def test_a_key_of_the_format_itself_is_refused():
    with pytest.raises(TypeError, match="__air_nb__"):
        freeze({"__air_nb__": "tensor"}, "state")


def test_reading_runs_nothing_that_the_file_says(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    torch.save(Evil(), tmp_path / "file")
    with pytest.raises(pickle.UnpicklingError):
        decode((tmp_path / "file").read_bytes())
    assert not (tmp_path / "owned").exists()


def test_tensors_can_go_elsewhere_under_their_names():
    taken = {}

    def take(tensor, name):
        taken[name] = tensor
        return name

    frozen = freeze({"a": [torch.ones(1), 2], "b": torch.zeros(2)}, "state", take)
    assert set(taken) == {"state.a[0]", "state.b"}
    back = thaw(decode(encode(frozen)), taken.__getitem__)
    assert back["b"] is taken["state.b"]
    assert back["a"][1] == 2
