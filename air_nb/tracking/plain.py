"""MLflow outside air_nb's launches, in a plain script or under torchrun: the run that is active there."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Mapping
from typing import SupportsFloat

__all__ = ["log_metrics", "number"]


def log_metrics(metrics: Mapping[str, SupportsFloat], step: int) -> None:
    """Log to the active run, or to the one that ``MLFLOW_RUN_ID`` names, in the background; warn once if there is none.

    A new run is never started: under torchrun every rank would start one.
    """
    mlflow = sys.modules.get("mlflow")
    if mlflow is None and "MLFLOW_RUN_ID" in os.environ:
        import mlflow
    if mlflow is None or (mlflow.active_run() is None and "MLFLOW_RUN_ID" not in os.environ):
        _warn()
        return
    mlflow.log_metrics({name: number(value) for name, value in metrics.items()}, step=int(step), synchronous=False)


def number(value: SupportsFloat) -> float:
    """A metric's value; of a tensor that has a gradient too, of which torch would warn."""
    return float(value.detach() if hasattr(value, "detach") else value)


@functools.cache
def _warn() -> None:
    warnings.warn(
        "log_metrics() logs nothing: no MLflow run is active. Call mlflow.start_run() first, or set MLFLOW_RUN_ID.",
        RuntimeWarning,
        stacklevel=4,
    )
