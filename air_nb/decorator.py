"""``@distributed``: a function that runs on every rank."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

from air_nb.errors import NotDistributedError
from air_nb.options import DECORATOR_TIMEOUT_S, RunOptions, parse_timeout

__all__ = ["DistributedFunction", "distributed"]

P = ParamSpec("P")
R = TypeVar("R")


class DistributedFunction(Generic[P, R]):
    """A function that ``@distributed`` was put on.

    Attributes:
        func: The plain function: ``train.func(...)`` calls it here, in this process.
        options: How it is launched.
    """

    def __init__(self, func: Callable[P, R], options: RunOptions) -> None:
        self.func = func
        self.options = options
        functools.update_wrapper(self, func)

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run on every rank and wait.

        Args:
            *args: Given to every rank.
            **kwargs: Given to every rank.

        Returns:
            Return values, index = rank.

        Raises:
            TypeError: The arguments don't fit the function's signature; nothing was started.
            CaptureError: An argument, or something that the function uses, can't be sent; nothing was started.
            DeviceError: The devices are not there; nothing was started.
            RankFailedError: A rank failed; ``results`` holds what the others returned.
            RunTimeoutError: The time limit was reached.
            KeyboardInterrupt: It was interrupted; no process of it is left.
        """
        labels = _positional_labels(self.func, args, kwargs)
        # Here, not at the top: `from air_nb import distributed` must be cheap.
        from air_nb.protocol.names import FUNCTION, RESULT
        from air_nb.session.launched import Launch
        from air_nb.session.session import get_session

        positional = {f"argument {label}": value for label, value in zip(labels, args, strict=True)}
        keywords = {f"argument {name}": value for name, value in kwargs.items()}
        launch = Launch(
            kind="function",
            source=_source_of(self.func),
            names={FUNCTION: self, **positional, **keywords},
            task={"positional": list(positional), "keywords": {name: f"argument {name}" for name in kwargs}},
        )
        values = get_session().run(launch, self.options, _shell())
        return [cast("R", value[RESULT]) for value in values]

    def with_overrides(self, **overrides: Any) -> DistributedFunction[P, R]:
        """The same function with other options, by the names that ``distributed`` takes.

        They win over what they contradict: ``nproc=2, device="cpu"`` over ``gpus=8, gpu_type="H100"``.

        Raises:
            TypeError: An unknown option.
            ValueError: An option out of range.
        """
        return DistributedFunction(self.func, _options(overrides, _without_contradicted(self.options, overrides)))

    def __call__(self, *_args: P.args, **_kwargs: P.kwargs) -> R:
        """Refuse: it would not be clear which of the two is meant."""
        name = self.func.__name__
        msg = (
            f"{name} is a distributed function: "
            f"{name}.distributed(...) runs it on the ranks, {name}.func(...) runs it here"
        )
        raise NotDistributedError(msg)

    def __repr__(self) -> str:
        return f"<distributed function {self.func.__qualname__}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        # A rank imports a function of a module by name, as it is on disk now; only the notebook's travel by value.
        name = self.func.__qualname__
        module = sys.modules.get(self.func.__module__)
        if self.func.__module__ != "__main__" and getattr(module, name, None) is self:
            return name
        return DistributedFunction, (self.func, self.options)


@overload
def distributed(gpus: Callable[P, R]) -> DistributedFunction[P, R]: ...
@overload
def distributed(
    gpus: int | None = None,
    gpu_type: str | None = None,
    timeout: float | str | None = DECORATOR_TIMEOUT_S,
    *,
    nproc: int | None = None,
    device: str = "auto",
    num_accelerators: int | None = None,
    accelerator_type: str | None = None,
    name: str | None = None,
    experiment: str | None = None,
    tracking: bool = True,
    resume: str | None = None,
    env: Mapping[str, str] | None = None,
    output: str = "merged",
) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]: ...
def distributed(
    gpus: Any = None,
    gpu_type: str | None = None,
    timeout: float | str | None = DECORATOR_TIMEOUT_S,
    *,
    nproc: int | None = None,
    device: str = "auto",
    num_accelerators: int | None = None,
    accelerator_type: str | None = None,
    name: str | None = None,
    experiment: str | None = None,
    tracking: bool = True,
    resume: str | None = None,
    env: Mapping[str, str] | None = None,
    output: str = "merged",
) -> Any:
    """Make a function run on many ranks, one process per GPU. With or without parentheses.

    ``train.distributed(...)`` runs it on every rank and returns a list, index = rank; ``train.func(...)`` calls it
    here.

    Args:
        gpus: Number of GPUs; None takes all visible ones, or 2 CPU ranks where there are none.
        gpu_type: Type that they must have, such as ``"H100"``, ``"A10"`` or ``"GPU_8xH100"``.
        timeout: Time limit in seconds or as ``"90m"``; None is no limit.
        nproc: Number of ranks, instead of ``gpus``; with ``device="cpu"`` any number.
        device: ``"auto"``, ``"cuda"`` or ``"cpu"``.
        num_accelerators: The same as ``gpus``.
        accelerator_type: The same as ``gpu_type``.
        name: Name of the run; None makes one up.
        experiment: MLflow experiment of the run; None is the active one, else one named after the notebook.
        tracking: Whether the run is tracked with MLflow.
        resume: What a ``CheckpointManager`` restores: ``"auto"``, ``"must"``, ``"never"`` or the path of a checkpoint.
        env: Environment variables for the ranks only.
        output: ``"merged"``, ``"rank0"``, ``"all"``, ``"tabs"`` or ``"none"``.

    Raises:
        ValueError: An option out of range, or options that contradict each other.
    """
    if callable(gpus):
        return DistributedFunction(gpus, _options({}, RunOptions(timeout_s=DECORATOR_TIMEOUT_S)))
    given: dict[str, Any] = {
        "gpus": gpus,
        "gpu_type": gpu_type,
        "timeout": timeout,
        "nproc": nproc,
        "device": device,
        "num_accelerators": num_accelerators,
        "accelerator_type": accelerator_type,
        "name": name,
        "experiment": experiment,
        "tracking": tracking,
        "resume": resume,
        "env": env,
        "output": output,
    }
    options = _options(given, RunOptions())

    def decorate(func: Callable[P, R]) -> DistributedFunction[P, R]:
        return DistributedFunction(func, options)

    return decorate


_ALIASES = {"num_accelerators": "gpus", "accelerator_type": "gpu_type", "timeout": "timeout_s"}
_WHICH_RANKS = ("gpus", "gpu_ids", "nproc", "num_accelerators")
_COUNTS = {"gpus", "nproc", "num_accelerators"}
_NOT_FOR_FUNCTIONS = {"inputs", "out", "pull"}


def _options(given: Mapping[str, Any], base: RunOptions) -> RunOptions:
    """``base`` with the options given, by the decorator's names."""
    changes: dict[str, Any] = {}
    known = {item.name for item in fields(RunOptions)} - _NOT_FOR_FUNCTIONS
    for option, value in given.items():
        field = _ALIASES.get(option, option)
        if field not in known or option == "timeout_s":
            msg = f"distributed has no option {option!r}"
            raise TypeError(msg)
        if option in ("num_accelerators", "accelerator_type"):
            if value is None:
                continue
            if changes.get(field) not in (None, value):
                msg = f"{option}={value!r} contradicts {field}={changes[field]!r}: they mean the same, give one"
                raise ValueError(msg)
        changes[field] = _convert(option, value)
    return replace(base, **changes)


def _without_contradicted(options: RunOptions, overrides: Mapping[str, Any]) -> RunOptions:
    if any(overrides.get(option) is not None for option in _WHICH_RANKS):
        options = replace(options, gpus=None, gpu_ids=None, nproc=None)
    return replace(options, gpu_type=None) if overrides.get("device") == "cpu" else options


def _convert(option: str, value: Any) -> Any:
    if option == "timeout" and value is not None:
        return parse_timeout(value) if isinstance(value, str) else float(value)
    if option in _COUNTS and value is not None:
        try:
            return operator.index(value)  # numpy's integers too
        except TypeError:
            msg = f"{option}={value!r}: give a whole number"
            raise TypeError(msg) from None
    if option == "env":
        return {str(key): str(text) for key, text in (value or {}).items()}
    if option == "gpu_ids" and value is not None:
        return tuple(str(item) for item in value)
    return value


def _positional_labels(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """What an error calls the positional arguments: by their parameters, ``rest[0]`` for those of ``*rest``.

    Raises:
        TypeError: The arguments don't fit the function's signature.
    """
    signature = inspect.signature(func)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        msg = f"{func.__name__}() {error}"
        raise TypeError(msg) from None
    labels: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            labels += [f"{name}[{index}]" for index in range(len(args) - len(labels))]
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            # A keyword of **rest may have the name of a parameter that is positional only.
            labels.append(f"{len(labels) + 1}" if name in kwargs else name)
    return labels[: len(args)]


def _source_of(func: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(func)
    except (OSError, TypeError):  # made by exec, or a builtin
        return f"# {func!r}: no source\n"


def _shell() -> Any:
    """IPython's shell, without importing IPython into a plain script."""
    interactive = sys.modules.get("IPython")
    return interactive.get_ipython() if interactive is not None else None
