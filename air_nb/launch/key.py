"""When a warm launcher is still valid: same interpreter, same libraries, same variables that they read at import."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LauncherKey", "changed", "current_key"]

_PRELOADED = ("torch", "numpy", "ipython", "cloudpickle", "air_nb")
_MODULES = {"ipython": "IPython"}
_PREFIXES = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TORCHDYNAMO_",
    "PYTORCH_",
    "CUBLAS_",
    "CUDNN_",
    "LD_",
    "PYTHON",
    "NUMPY_",
    "NPY_",
    "TRITON_",
    "IPYTHON",
)
_EXEMPT = frozenset(
    {
        # Applied in the child, or read there: no reason for a new launcher.
        *("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONBREAKPOINT", "PYTHONSTARTUP"),
        # Set by `import sklearn` for the process that it is imported in.
        *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
    }
)


@dataclass(frozen=True, slots=True)
class LauncherKey:
    """What must not differ between a launcher and the kernel that uses it."""

    facts: Mapping[str, str]


def current_key(environ: Mapping[str, str] | None = None) -> LauncherKey:
    """The key as of now."""
    variables = os.environ if environ is None else environ
    facts = {"python": sys.executable}
    for distribution in _PRELOADED:
        facts[distribution] = _distribution_facts(distribution)
    facts |= {name: value for name, value in variables.items() if name.startswith(_PREFIXES) and name not in _EXEMPT}
    return LauncherKey(facts)


def _distribution_facts(distribution: str) -> str:
    try:
        version = importlib.metadata.version(distribution)
        spec = importlib.util.find_spec(_MODULES.get(distribution, distribution))
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError, ValueError):
        return "not installed"
    return f"{version} at {spec.origin if spec else None}"


def changed(old: LauncherKey, new: LauncherKey) -> tuple[str, ...]:
    """Names of what differs."""
    return tuple(name for name in sorted({*old.facts, *new.facts}) if old.facts.get(name) != new.facts.get(name))
