"""What it costs a notebook to have air_nb: ``import air_nb`` and ``%load_ext air_nb``."""

from __future__ import annotations

import ast

from benchmarks.harness import bench_kernel
from benchmarks.report import Report, Settings

__all__ = ["run"]

_HEAVY = ("torch", "mlflow", "ipywidgets", "pynvml")
_IMPORT = "import sys, time; t = time.perf_counter(); import air_nb; t = time.perf_counter() - t"
_LOAD = "t = time.perf_counter(); get_ipython().run_line_magic('load_ext', 'air_nb'); t = time.perf_counter() - t"


def run(settings: Settings) -> Report:
    """Measure in fresh kernels, where IPython is there already, as it is for every user."""
    report = Report("imports")
    for repeat in settings.rounds:
        with bench_kernel() as kernel:
            kernel.ok(_IMPORT)
            imported = ast.literal_eval(kernel.value("t"))
            kernel.ok(_LOAD)
            loaded = ast.literal_eval(kernel.value("t"))
            heavy = kernel.value(f"[name for name in {_HEAVY!r} if name in sys.modules]")
        report.add("fresh kernel", "import air_nb", "air_nb", 1000 * imported, "ms", repeat=repeat)
        report.add("fresh kernel", "%load_ext air_nb, once imported", "air_nb", 1000 * loaded, "ms", repeat=repeat)
        report.add("fresh kernel", f"of {', '.join(_HEAVY)} imported", "air_nb", heavy, repeat=repeat)
        with bench_kernel() as kernel:
            cell = kernel.ok("%load_ext air_nb")
        took = 1000 * (cell.idle_at - cell.sent_at)
        report.add("fresh kernel", "cell `%load_ext air_nb`, sent to idle", "air_nb", took, "ms", repeat=repeat)
    return report
