"""What the user's MLflow state in this process says about the run of a launch.

Reads the environment, and the ``mlflow`` module if the user has imported it; never imports MLflow, and changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import pathname2url

from air_nb.protocol.tracking import TrackingRequest
from air_nb.session.doctor import torch_facts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from air_nb.options import RunOptions
    from air_nb.topology import Topology

__all__ = [
    "FALLBACK_EXPERIMENT",
    "SWITCH_VARIABLE",
    "has_mlflow",
    "is_switched_off",
    "rank_variables",
    "source_name",
    "tracking_request",
    "tracking_uri",
]

SWITCH_VARIABLE = "AIR_NB_TRACKING"
FALLBACK_EXPERIMENT = "air_nb"
"""Experiment of a launch from where there is neither a notebook nor a script with a name."""

_SQLITE = "sqlite:///"
_HAS_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
# MLflow waits minutes for a server that is down. What a rank logs does not go there, but what it reads does.
_SHORT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


def is_switched_off() -> bool:
    """Whether the user has switched tracking off for this process."""
    return os.environ.get(SWITCH_VARIABLE, "").lower() in {"0", "off", "false", "no"}


def has_mlflow() -> bool:
    """Whether MLflow is installed."""
    return "mlflow" in sys.modules or importlib.util.find_spec("mlflow") is not None


def tracking_request(
    options: RunOptions, run_name: str, topology: Topology, captured: Mapping[str, int], user_ns: Mapping[str, Any]
) -> TrackingRequest:
    """The MLflow run that this launch asks for."""
    active = _active_run()
    experiment_id, experiment_name = _experiment(options, active, user_ns)
    resumed = os.environ.get("MLFLOW_RUN_ID") or None
    parent = active.info.run_id if active is not None else None
    return TrackingRequest(
        run_name=run_name,
        tracking_uri=tracking_uri(),
        registry_uri=_registry_uri(),
        experiment_id=experiment_id,
        experiment_name=experiment_name,
        parent_run_id=parent,
        resume_run_id=None if parent else resumed,
        cwd=str(Path.cwd()),
        source_name=source_name(user_ns),
        params=_params(options, topology),
        captured=dict(captured),
    )


def rank_variables(request: TrackingRequest) -> dict[str, str | None]:
    """Environment of the ranks; None takes a variable away. The run's id comes later (``tracking.rank_hook``)."""
    found: dict[str, str | None] = {
        "MLFLOW_TRACKING_URI": request.tracking_uri,
        "MLFLOW_EXPERIMENT_ID": request.experiment_id,
        "MLFLOW_EXPERIMENT_NAME": request.experiment_name if request.experiment_id is None else None,
        # The tracking process samples this node once; each rank would do it again.
        "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
    }
    if request.registry_uri is not None:
        found["MLFLOW_REGISTRY_URI"] = request.registry_uri
    return found | {name: value for name, value in _SHORT.items() if name not in os.environ}


def tracking_uri() -> str:
    """The absolute tracking URI; MLflow's own default is a database in the working directory."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and hasattr(mlflow, "get_tracking_uri"):
        found = str(mlflow.get_tracking_uri())
    else:
        found = os.environ.get("MLFLOW_TRACKING_URI") or _default_uri()
    return _absolute(found)


def source_name(user_ns: Mapping[str, Any]) -> str | None:
    """The notebook (Jupyter says it to its kernels, VS Code to the namespace) or the script; None elsewhere."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    ipython = sys.modules.get("IPython")
    is_shell = ipython is not None and ipython.get_ipython() is not None  # a kernel is a script too, ipykernel's
    if script is not None and not is_shell:  # before the notebook, whose environment a `!python script.py` inherits
        return str(script)
    notebook = os.environ.get("JPY_SESSION_NAME") or user_ns.get("__vsc_ipynb_file__")
    return str(notebook) if notebook else None


def _experiment(options: RunOptions, active: Any | None, user_ns: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Id or name. ``mlflow.set_experiment()`` leaves the id in the environment."""
    if options.experiment is not None:
        return None, options.experiment
    if active is not None:
        return str(active.info.experiment_id), None
    if experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return experiment_id, None
    if name := os.environ.get("MLFLOW_EXPERIMENT_NAME"):
        return None, name
    return None, _experiment_of(source_name(user_ns))


def _experiment_of(source: str | None) -> str:
    path = Path(source or "")
    return (path.parent.name if path.stem == "__main__" else path.stem) or FALLBACK_EXPERIMENT


def _active_run() -> Any | None:
    """The run that is active in this thread."""
    mlflow = sys.modules.get("mlflow")
    return mlflow.active_run() if mlflow is not None and hasattr(mlflow, "active_run") else None


def _registry_uri() -> str | None:
    mlflow = sys.modules.get("mlflow")
    chosen = os.environ.get("MLFLOW_REGISTRY_URI")
    if mlflow is not None and hasattr(mlflow, "get_registry_uri"):
        found = str(mlflow.get_registry_uri())
        return None if _absolute(found) == tracking_uri() else _absolute(found)
    return _absolute(chosen) if chosen else None


def _default_uri() -> str:
    """As MLflow 3.7 and newer: a store of files that is there already, else a database."""
    files = Path.cwd() / "mlruns"
    if any(entry.parent.name.isdigit() for entry in files.glob("*/meta.yaml")):
        return files.as_uri()
    return f"{_SQLITE}mlflow.db"


def _absolute(uri: str) -> str:
    """A rank may change its directory, and the tracking process has another one."""
    if uri.startswith(_SQLITE) and not uri.startswith(f"{_SQLITE}/"):
        return _SQLITE + pathname2url(str(Path.cwd() / uri.removeprefix(_SQLITE)))
    if _HAS_SCHEME.match(uri) or uri.startswith("databricks"):
        return uri
    return Path(uri).expanduser().absolute().as_uri()


def _params(options: RunOptions, topology: Topology) -> dict[str, str]:
    facts = {
        "nnodes": topology.nnodes,
        "nproc_per_node": topology.nproc_per_node,
        "device": topology.device,
        "devices": ", ".join(topology.gpu_labels) or "CPU",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "cuda": torch_facts().get("cuda") or "none",
        "output": options.output,
        "timeout_s": options.timeout_s,
        "gpu_type": options.gpu_type,
        "inputs": ", ".join(options.inputs) if options.inputs is not None else None,
        "env": ", ".join(sorted(options.env)) or None,
    }
    return {f"air_nb.{name}": str(value) for name, value in facts.items() if value is not None}
