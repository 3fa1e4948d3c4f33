"""The public modules export what they define, all of it, and nothing else."""

from __future__ import annotations

import importlib
import inspect
import pickle
from types import ModuleType

import pytest

from air_nb import errors

PUBLIC_MODULES = ["air_nb", "air_nb.errors", "air_nb.monitor", "air_nb.runtime"]


@pytest.fixture(params=PUBLIC_MODULES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def test_every_exported_name_exists_once_in_order(module: ModuleType):
    exported = list(module.__all__)
    assert [name for name in exported if not hasattr(module, name)] == []
    assert len(exported) == len(set(exported))
    assert sorted(exported) == sorted(set(exported) & set(dir(module))), "dir() must show what can be imported"


def test_every_public_class_and_function_of_a_module_is_exported(module: ModuleType):
    defined = {
        name
        for name, member in vars(module).items()
        if (inspect.isclass(member) or inspect.isfunction(member))
        and member.__module__ == module.__name__
        and not name.startswith("_")
    }
    assert defined - set(module.__all__) == set()


def test_every_exported_class_and_function_says_what_it_is_for(module: ModuleType):
    members = {name: getattr(module, name) for name in module.__all__ if not name.startswith("__")}
    callables = {name: member for name, member in members.items() if callable(member)}
    assert [name for name, member in callables.items() if not inspect.getdoc(member)] == []


_FAILURE = errors.RankFailure(
    rank=2, attempt=0, pid=7, exit_code=None, signal="SIGSEGV", type_name="", message="died", traceback="", at=1.5
)
_EXAMPLES: list[Exception] = [
    errors.AirNbError("base"),
    errors.CaptureError((errors.Uncapturable("log", "TextIOWrapper", "open file", "Open it inside the cell."),)),
    errors.DeviceError("8 GPUs asked for, 0 found"),
    errors.LauncherError("died"),
    errors.NestedLaunchError("inside rank 1"),
    errors.NotDistributedError("train is distributed"),
    errors.RemoteError(type_name="pkg.Odd", message="text"),
    *(
        error("step_3 lacks bytes")
        for error in (
            *(
                errors.PagesError,
                errors.DataError,
                errors.ManifestChangedError,
                errors.CheckpointError,
                errors.CheckpointNotFoundError,
            ),
            *(errors.CheckpointDamagedError, errors.CheckpointMismatchError),
        )
    ),
    *(
        error("rank 2 failed", run_id="r1", failures=(_FAILURE,), results=[1, None], lines=("shown",))
        for error in (errors.RunError, errors.RankFailedError, errors.RunTimeoutError, errors.RunStoppedError)
    ),
]


def test_the_tree_in_the_docstring_shows_every_exception():
    exported = {getattr(errors, name) for name in errors.__all__}
    exceptions = {member for member in exported if issubclass(member, BaseException)}
    assert exceptions == {type(example) for example in _EXAMPLES}
    assert errors.__doc__ is not None
    assert [error.__name__ for error in exceptions if error.__name__ not in errors.__doc__] == []
    # A RemoteError stands in for an exception of the user's code: catching ours must not catch it.
    assert {error for error in exceptions if not issubclass(error, errors.AirNbError)} == {errors.RemoteError}


@pytest.mark.parametrize("error", _EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_exception_survives_pickling_with_its_fields(error: Exception):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("error", _EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_exception_can_be_kept_in_a_set(error: Exception):
    assert len({error}) == 1  # what contextlib, pytest and concurrent.futures do with them
