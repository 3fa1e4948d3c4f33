"""``%air doctor``: what a run depends on, what is wrong with it, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import runpy
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from air_nb.monitor.gpu_report import DriverState, GpuState
from air_nb.runs.paths import home, is_network_path, node_local
from air_nb.session.versions import MINIMUM_VERSIONS, is_too_old, minimum_text

if TYPE_CHECKING:
    from air_nb.session.session import Session

__all__ = ["Finding", "doctor_text", "findings", "torch_facts"]

_MIN_SHM_BYTES = 1 << 30
_MIN_FREE_BYTES = 2 << 30
_MIN_OPEN_FILES = 4096
_MIN_PROCESSES = 4096
_SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written to
_OPTIONAL = frozenset({"jupyterlab", "ipywidgets", "ipykernel"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: Its name.
        value: What was found.
        fix: What is wrong and what to do; None if all is well.
    """

    what: str
    value: str
    fix: str | None = None

    def __str__(self) -> str:
        mark = "ok  " if self.fix is None else "LOOK"
        line = f"{mark}  {self.what:<18} {self.value}"
        return line if self.fix is None else f"{line}\n      → {self.fix}"


def doctor_text(session: Session) -> str:
    """All findings, and how many need a look."""
    found = list(findings(session))
    wrong = sum(finding.fix is not None for finding in found)
    summary = "all is well" if not wrong else f"{wrong} thing{'s' if wrong > 1 else ''} to look at, marked LOOK"
    return "\n".join([*map(str, found), summary])


def findings(session: Session) -> Iterator[Finding]:
    """Look at everything; each costs milliseconds, the GPUs up to two seconds."""
    yield Finding("Python", f"{sys.version.split()[0]} at {sys.executable}")
    yield from _versions()
    yield _torch_build()
    yield from _gpus(session)
    yield from _limits()
    yield _launcher(session)
    yield from _directories()


def _versions() -> Iterator[Finding]:
    for distribution in MINIMUM_VERSIONS:
        cure = f"pip install '{distribution}>={minimum_text(distribution)}'"
        try:
            found = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(distribution, "not installed", None if distribution in _OPTIONAL else cure)
            continue
        yield Finding(distribution, found, cure if is_too_old(distribution, found) else None)


def torch_facts() -> dict[str, Any]:
    """Torch's ``version.py``, read as a file: importing torch here would cost the kernel a second and its memory."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


def _torch_build() -> Finding:
    facts = torch_facts()
    if not facts:
        return Finding("torch build", "torch is not installed", "pip install torch")
    names = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
    nccl = next(
        (f"{name} {version}" for name, version in names.items() if (name or "").startswith("nvidia-nccl")), None
    )
    cuda = facts.get("cuda")
    return Finding("torch build", f"CUDA {cuda}, {nccl or 'NCCL as built into it'}" if cuda else "CPU only (gloo)")


def _gpus(session: Session) -> Iterator[Finding]:
    report = session.sampler.sample()
    if report.driver_state in (DriverState.NO_LIBRARY, DriverState.NO_DRIVER):
        yield Finding("GPUs", f"none ({report.reason or report.driver_state}); ranks run on the CPU")
        return
    if report.driver_state != DriverState.OK:
        yield Finding("GPUs", str(report.driver_state), f"the driver did not answer: {report.reason}; try nvidia-smi")
        return
    yield Finding("driver", report.driver_version or "unknown version")
    for gpu in report.gpus:
        lost = gpu.state != GpuState.OK
        fix = f"{gpu.reason or gpu.state}: see `dmesg | grep -i xid`; a reset or a reboot may be needed"
        yield Finding(f"GPU {gpu.index}", gpu.name or "unknown", fix if lost else None)
    if not torch_facts().get("cuda"):
        fix = "install a CUDA build of torch, else the GPUs stay unused"
        yield Finding("torch and GPUs", "torch is a CPU build", fix)


def _limits() -> Iterator[Finding]:
    shm = shutil.disk_usage(_SHM)
    fix = "loader workers need it: start the container with --shm-size=8g, or enlarge the tmpfs"
    yield Finding(str(_SHM), f"{_gib(shm.free)} free of {_gib(shm.total)}", fix if shm.free < _MIN_SHM_BYTES else None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES
    fix = f"raise it before Jupyter starts: ulimit -n {_limit(hard)}"
    yield Finding("open files", f"{_limit(soft)} (at most {_limit(hard)})", fix if low else None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    low = soft != resource.RLIM_INFINITY and soft < _MIN_PROCESSES
    fix = f"raise it before Jupyter starts: ulimit -u {_limit(hard)}"
    yield Finding("processes", f"{_limit(soft)} (at most {_limit(hard)})", fix if low else None)
    yield Finding("CPU cores", str(len(os.sched_getaffinity(0))))


def _launcher(session: Session) -> Finding:
    launcher = session.launcher
    if launcher is None:
        return Finding("launcher", "not started; the first run starts it")
    if not launcher.is_alive:
        fix = f"the next run starts a new one. Its last words: {launcher.log_tail() or 'none'}"
        return Finding("launcher", "ended", fix)
    if launcher.ready is None:
        return Finding("launcher", f"warming up (pid {launcher.pid})")
    return Finding("launcher", f"warm (pid {launcher.pid}, {launcher.ready.warm_s:.1f} s)", launcher.ready.problem)


def _directories() -> Iterator[Finding]:
    fix = "point AIR_NB_HOME at a directory of yours, before the kernel starts: output and results go there"
    try:
        path = home()
    except OSError as error:
        yield Finding("run directory", str(error), fix)
        return
    free = shutil.disk_usage(path).free
    fix = "free some space, or point AIR_NB_HOME at another disk: output and results go there"
    yield Finding("run directory", f"{path}, {_gib(free)} free", fix if free < _MIN_FREE_BYTES else None)
    where = "on this machine"
    if is_network_path(path):
        where = f"on a network file system: live runs are kept in {node_local()} and moved when they end"
    yield Finding("its file system", where)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
