"""MLflow's own monitor of this machine for one run, kept at arm's length: a driver that hangs must hold up nothing.

The monitor asks the GPUs' driver, so it is made, watched and ended on a thread of its own, ``air_nb-system-metrics``.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from air_nb.tracking.mlflow_run import MlflowRun

__all__ = ["SystemMetrics"]

_LOOK_EVERY_S = 10.0


class SystemMetrics:
    """See the module.

    Args:
        run: The MLflow run.
        tracking_uri: Of its store, with the password.
    """

    def __init__(self, run: MlflowRun, tracking_uri: str) -> None:
        self._run = run
        self._tracking_uri = tracking_uri
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="air_nb-system-metrics", daemon=True)

    def start(self) -> None:
        """Start, unless the user has switched system metrics off."""
        if os.environ.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true").lower() not in {"false", "0"}:
            self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Have the last samples sent; waits for that, with a bound."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _watch(self) -> None:
        resumed = self._run.is_resumed
        while not self._over.is_set():
            started = time.monotonic()
            monitor = self._monitor(resumed=resumed)
            monitor.start()
            # It ends by itself when the store has failed once, and has to be followed by another one.
            while not self._over.wait(_LOOK_EVERY_S) and _is_running(monitor):
                pass
            monitor.finish()
            resumed = True
            self._over.wait(max(0.0, _LOOK_EVERY_S - (time.monotonic() - started)))

    def _monitor(self, *, resumed: bool) -> Any:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        return SystemMetricsMonitor(self._run.run_id, resume_logging=resumed, tracking_uri=self._tracking_uri)


def _is_running(monitor: Any) -> bool:
    return monitor._process is not None and monitor._process.is_alive()  # noqa: SLF001 - guarded by a canary test
