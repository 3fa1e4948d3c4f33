"""Makes MLflow in a rank log into the launch's own run, from the first ``import mlflow`` on.

The rank calls ``install`` before the user's code. It costs nothing until MLflow is imported, by whoever: only then the
modules that do the work are loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["install"]


def install(directory: Path, rank: int) -> None:
    """Wait for the first import of MLflow.

    Args:
        directory: Run directory, with the tracking request in it.
        rank: Global rank.
    """
    sys.meta_path.insert(0, _Finder(directory, rank))


class _Finder:
    """Finds MLflow as the other finders do, and adds to the end of its loading."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """MLflow's spec, whose loader calls us back; None for every other module."""
        if fullname != "mlflow":
            return None
        others = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path) if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:  # None: a directory that happens to have the name
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # a reload is MLflow's own affair
            execute(module)
            if "mlflow.tracking.fluent" in sys.modules:  # it is MLflow, whole, not its package for tracing alone
                self._adopt()
            sys.meta_path.remove(self)  # not before: who goes on after an interrupt imports it anew

        loader.exec_module = exec_module

    def _adopt(self) -> None:
        from air_nb.tracking import rank_fluent
        from air_nb.tracking.rank_run import RankRun

        try:
            run = RankRun(self._directory, self._rank)
            rank_fluent.adopt(run)
        except rank_fluent.MlflowException:
            raise  # what the user has to change
        except Exception as error:  # noqa: BLE001 - the border to a library's insides: training goes on without us
            sys.stderr.write(
                f"air_nb: rank {self._rank} could not prepare MLflow ({type(error).__name__}: {error}): what it logs "
                "does not go to this launch's run. Is this version of MLflow supported? %air doctor says.\n"
            )
