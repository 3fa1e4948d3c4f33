"""Details of cloudpickle that ``protocol.freezer`` leans on: where one fails, read that module again."""

from __future__ import annotations

import io
import types
from typing import Any

import cloudpickle
import pytest

_CHANGED = f"cloudpickle {cloudpickle.__version__} has changed"


@pytest.fixture
def namespace() -> dict[str, Any]:
    made: dict[str, Any] = {"__name__": "__main__", "lr": 1}
    exec("def f(): return lr\nclass C: pass", made)
    return made


def test_globals_ref_gives_the_globals_of_rebuilt_functions(namespace):
    pickler = cloudpickle.Pickler(io.BytesIO(), protocol=5)
    stand_in = {"not": "empty"}
    pickler.globals_ref[id(namespace)] = stand_in
    _, arguments, *_ = pickler.reducer_override(namespace["f"])
    assert arguments[1] is stand_in, f"{_CHANGED}: the second argument of a function's constructor was its globals"
    assert stand_in == {"not": "empty"}, f"{_CHANGED}: globals that are not empty were left alone"


def test_functions_reduce_to_six_parts_with_the_globals_they_read(namespace):
    reduced = cloudpickle.Pickler(io.BytesIO(), protocol=5).reducer_override(namespace["f"])
    assert len(reduced) == 6, f"{_CHANGED}: a function was (make, arguments, state, None, None, set state)"
    assert reduced[2][1]["__globals__"] == {"lr": 1}, f"{_CHANGED}: state[1]['__globals__'] was what the function reads"


def test_classes_reduce_to_six_parts(namespace):
    reduced = cloudpickle.Pickler(io.BytesIO(), protocol=5).reducer_override(namespace["C"])
    assert len(reduced) == 6, f"{_CHANGED}: a class was (make, arguments, state, None, None, set state)"


@pytest.mark.parametrize(
    "by_reference", [len, int, type(None), type(...), types.FunctionType, io.BytesIO, cloudpickle.dumps]
)
def test_what_goes_by_reference_never_has_six_parts(by_reference):
    reduced = cloudpickle.Pickler(io.BytesIO(), protocol=5).reducer_override(by_reference)
    assert reduced is NotImplemented or len(reduced) < 6, f"{_CHANGED}: {by_reference!r} was a reference"


def test_code_reduces_to_the_arguments_of_its_constructor(namespace):
    code = namespace["f"].__code__
    constructor, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    assert constructor is types.CodeType, f"{_CHANGED}: code was rebuilt by types.CodeType"
    rebuilt = types.CodeType(*arguments).replace(co_filename=code.co_filename)
    assert rebuilt == code, f"{_CHANGED}: the arguments gave the same code"
