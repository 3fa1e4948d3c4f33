"""Options of one launch: what the magic line and the decorator say, validated (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Literal, get_args

__all__ = ["DECORATOR_TIMEOUT_S", "DeviceOption", "OutputMode", "RunOptions", "parse_env", "parse_timeout"]

OutputMode = Literal["merged", "rank0", "all", "tabs", "none"]
DeviceOption = Literal["auto", "cuda", "cpu"]

DECORATOR_TIMEOUT_S = 10_800.0
"""Default time limit of ``@distributed``, as documented for the API that it mirrors."""

_DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?")
_NAME = re.compile(r"[\w .:+()=@-]{1,120}")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the user asked for.

    Attributes:
        gpus: Number of GPUs; None takes all visible ones.
        gpu_ids: Indices into the kernel's visible GPUs, or UUIDs.
        nproc: Number of ranks; None is one per GPU.
        device: ``"auto"`` takes GPUs where there are any.
        gpu_type: Type that the GPUs must have (``"H100"``).
        inputs: Only these names are captured; None is the names that the cell reads.
        out: Name that receives the last expression's value of every rank.
        pull: Names fetched from every rank when the cell has ended.
        output: How the output of the ranks is shown.
        quiet: No header, no footer, stable text.
        timeout_s: Time limit in seconds; None is no limit.
        name: Name of the run; None makes one up.
        experiment: MLflow experiment of the run; None is the active one, else one named after the notebook.
        tracking: Whether the run is tracked with MLflow.
        resume: What a ``CheckpointManager`` of the ranks restores: ``"auto"``, ``"must"``, ``"never"`` or the path of a
            checkpoint; None leaves it to the code.
        env: Environment variables for the ranks only.
        cold: Start a new launcher first.

    Raises:
        ValueError: Values out of range, or options that contradict each other.
    """

    gpus: int | None = None
    gpu_ids: tuple[str, ...] | None = None
    nproc: int | None = None
    device: DeviceOption = "auto"
    gpu_type: str | None = None
    inputs: tuple[str, ...] | None = None
    out: str | None = None
    pull: tuple[str, ...] = ()
    output: OutputMode = "merged"
    quiet: bool = False
    timeout_s: float | None = None
    name: str | None = None
    experiment: str | None = None
    tracking: bool = True
    resume: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cold: bool = False

    def __post_init__(self) -> None:
        """Refuse what can't be meant."""
        for option, value in (("--gpus", self.gpus), ("--nproc", self.nproc)):
            if value is not None and value < 1:
                msg = f"{option} {value}: the number must be 1 or more"
                raise ValueError(msg)
        self._check_devices()
        _check_choice("--device", self.device, get_args(DeviceOption))
        _check_choice("--output", self.output, get_args(OutputMode))
        if self.timeout_s is not None and self.timeout_s <= 0:
            msg = f"--timeout {self.timeout_s:g}: the time must be positive, or `none`"
            raise ValueError(msg)
        out = () if self.out is None else (self.out,)
        for option, names in (("--in", self.inputs or ()), ("--pull", self.pull), ("--out", out)):
            for name in names:
                if not name.isidentifier() or iskeyword(name):
                    msg = f"{option} {name}: not a variable name"
                    raise ValueError(msg)
        self._check_texts()

    def _check_texts(self) -> None:
        for option, text in (("--experiment", self.experiment), ("--resume", self.resume)):
            if text is not None and not text.strip():
                msg = f"{option} '': it is empty"
                raise ValueError(msg)
        if self.experiment is not None and not self.tracking:
            msg = f"--no-mlflow contradicts --experiment {self.experiment}: give one of the two"
            raise ValueError(msg)
        if self.name is not None and not _NAME.fullmatch(self.name):
            msg = f"--name {self.name!r}: 1 to 120 letters, digits, spaces or . _ : + ( ) = @ - are allowed"
            raise ValueError(msg)

    def _check_devices(self) -> None:
        if self.gpu_ids is not None:
            if not self.gpu_ids or len(set(self.gpu_ids)) != len(self.gpu_ids):
                msg = f"--gpu-ids {','.join(self.gpu_ids)}: give each GPU once"
                raise ValueError(msg)
            if self.gpus is not None and self.gpus != len(self.gpu_ids):
                msg = f"--gpus {self.gpus} contradicts --gpu-ids {','.join(self.gpu_ids)}: give one of the two"
                raise ValueError(msg)
        wants_gpus = self.gpus is not None or self.gpu_ids is not None
        if wants_gpus and self.nproc is not None:
            msg = "--nproc contradicts --gpus/--gpu-ids: there is one rank per GPU, give one of them"
            raise ValueError(msg)
        if wants_gpus and self.device == "cpu":
            msg = "--device cpu contradicts --gpus/--gpu-ids: use --nproc N --device cpu for N ranks on the CPU"
            raise ValueError(msg)
        if self.gpu_type is not None and self.device == "cpu":
            msg = f"--device cpu contradicts --gpu-type {self.gpu_type}"
            raise ValueError(msg)


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        msg = f"{option} {value}: choose one of {', '.join(choices)}"
        raise ValueError(msg)


def parse_timeout(text: str) -> float | None:
    """Read a time limit: ``3h``, ``90m``, ``1h30m``, ``600`` or ``600s``; ``none`` is no limit.

    Returns:
        Seconds, or None for no limit.

    Raises:
        ValueError: Anything else.
    """
    lowered = text.strip().lower()
    if lowered == "none":
        return None
    found = _DURATION.fullmatch(lowered)
    if not lowered or found is None:
        msg = f"--timeout {text}: give seconds, or a time such as 90m or 1h30m, or `none`"
        raise ValueError(msg)
    hours, minutes, seconds = (float(found[unit] or 0) for unit in ("h", "m", "s"))
    return hours * 3600 + minutes * 60 + seconds


def parse_env(pairs: list[str]) -> dict[str, str]:
    """Read ``K=V`` pairs.

    Raises:
        ValueError: A pair without ``=`` or with an empty name.
    """
    env = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            msg = f"--env {pair}: give NAME=VALUE"
            raise ValueError(msg)
        env[key] = value
    return env
