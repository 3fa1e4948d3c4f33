"""Reads the GPUs through NVML: the only module that imports pynvml, and it does so in the sampling process only.

NVML can hang, crash, or fail for one GPU or one field alone, so each field is read on its own: what a GPU does not
support is None, a lost GPU is a state of that GPU, and the others go on. Handles are taken anew for every sample, since
one stays invalid after a GPU was lost and came back.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pynvml

from air_nb.monitor.gpu_report import DriverState, GpuProcess, GpuReport, GpuSample, GpuState, utc_now
from air_nb.monitor.throttle import throttle_words

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NvmlReader"]

# Answers that mean "this GPU or this driver doesn't tell", not "something is broken".
_NOT_TOLD = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_DATA,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)


class NvmlReader:
    """Samples all GPUs; keeps what it knows of a GPU (name, UUID) for the time when that GPU can't be asked."""

    def __init__(self) -> None:
        self._initialized = False
        self._known: dict[int, GpuSample] = {}

    def read(self) -> GpuReport:
        """Sample all GPUs now. Blocks for as long as the driver does; never raises for what the driver answers."""
        try:
            return self._read()
        except pynvml.NVMLError as error:
            self._shut_down()
            return GpuReport(utc_now(), *_driver_failure(error))

    def _read(self) -> GpuReport:
        if not self._initialized:
            pynvml.nvmlInit()
            self._initialized = True
        count = pynvml.nvmlDeviceGetCount()
        gpus = tuple(self._read_gpu(index) for index in range(count))
        version = _told(pynvml.nvmlSystemGetDriverVersion)
        return GpuReport(utc_now(), DriverState.OK, driver_version=version, gpus=gpus)

    def _read_gpu(self, index: int) -> GpuSample:
        known = self._known.get(index, GpuSample(index))
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            known = GpuSample(index, _told(pynvml.nvmlDeviceGetUUID, handle), _told(pynvml.nvmlDeviceGetName, handle))
            self._known[index] = known
            return _read_fields(handle, known)
        except pynvml.NVMLError as error:
            lost = error.value == pynvml.NVML_ERROR_GPU_IS_LOST
            return replace(known, state=GpuState.LOST if lost else GpuState.ERROR, reason=str(error))

    def _shut_down(self) -> None:
        if self._initialized:
            self._initialized = False
            with contextlib.suppress(pynvml.NVMLError):  # it only matters that the next sample starts afresh
                pynvml.nvmlShutdown()


def _read_fields(handle: Any, known: GpuSample) -> GpuSample:
    utilization = _told(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _read_memory(handle)
    mig_mode = _told(pynvml.nvmlDeviceGetMigMode, handle)
    return replace(
        known,
        utilization_percent=None if utilization is None else int(utilization.gpu),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        temperature_celsius=_told(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        power_watts=_watts(_told(pynvml.nvmlDeviceGetPowerUsage, handle)),
        power_limit_watts=_watts(_told(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        clock_sm_mhz=_told(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        throttle_reasons=_read_throttle_reasons(handle),
        mig=None if mig_mode is None else mig_mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        processes=_read_processes(handle),
    )


def _read_memory(handle: Any) -> Any:
    """Version 2 of the call leaves the driver's reserve out of `used`; drivers before 510 only have version 1."""
    memory = _told(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    return memory if memory is not None else _told(pynvml.nvmlDeviceGetMemoryInfo, handle)


def _read_throttle_reasons(handle: Any) -> tuple[str, ...] | None:
    """Drivers before 535 know the call by its first name only, which pynvml is to lose with CUDA 14."""
    bits = _told(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if bits is None and (older := getattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)):
        bits = _told(older, handle)
    return None if bits is None else throttle_words(bits)


def _read_processes(handle: Any) -> tuple[GpuProcess, ...]:
    """Compute and graphics processes: a desktop holds memory too, and a process can be on both lists."""
    used: dict[int, int | None] = {}
    for call in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _told(call, handle) or ():
            told = process.usedGpuMemory
            used[process.pid] = told if told is not None else used.get(process.pid)
    processes = (_describe(pid, used_bytes) for pid, used_bytes in used.items())
    return tuple(sorted(processes, key=lambda process: (-(process.used_bytes or 0), process.pid)))


def _describe(pid: int, used_bytes: int | None) -> GpuProcess:
    """Adds name and owner, as far as this user and this container can see them."""
    try:
        process = psutil.Process(pid)
        return GpuProcess(pid, used_bytes, process.name(), process.username())
    except psutil.Error:
        return GpuProcess(pid, used_bytes)


def _told(call: Callable[..., Any], *args: object) -> Any:
    """What the call answers, None if the driver doesn't tell.

    Args:
        call: A function of pynvml.
        args: Its arguments.

    Raises:
        NVMLError: for every other answer.
    """
    try:
        return call(*args)
    except pynvml.NVMLError as error:
        if error.value in _NOT_TOLD:
            return None
        raise
    except pynvml.NVMLLibraryMismatchError:  # pynvml's own name for "function not found", and no NVMLError
        return None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _driver_failure(error: pynvml.NVMLError) -> tuple[DriverState, str]:
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return DriverState.NO_LIBRARY, "libnvidia-ml.so.1 was not found, so no NVIDIA driver is installed here"
    if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return DriverState.NO_DRIVER, "the NVIDIA driver is not loaded"
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        advice = "the driver was updated under the running one: reboot, or reload its kernel modules"
        return DriverState.ERROR, f"NVML and the loaded NVIDIA driver are of different versions; {advice}"
    return DriverState.ERROR, f"NVML failed: {error}"
