"""What the GPUs of this machine do and who has them: sampled in a process of its own, polled, chosen, locked, drawn.

Only the sampling process (`process`, `nvml`) talks to the driver. The rest runs in the kernel and never imports pynvml.
For scripts: `sample` tells once, a `Sampler` again and again.
"""

from __future__ import annotations

from air_nb.monitor.gpu_report import DriverState, GpuProcess, GpuReport, GpuSample, GpuState
from air_nb.monitor.sampler import Sampler

__all__ = ["DriverState", "GpuProcess", "GpuReport", "GpuSample", "GpuState", "Sampler", "sample"]


def sample(timeout_s: float = 30.0) -> GpuReport:
    """Sample all GPUs of this machine once.

    Starts a sampling process and ends it, which takes a moment. Who samples again and again keeps one::

        with air_nb.monitor.Sampler() as sampler:
            while training:
                report = sampler.sample()

    Example:
        >>> import air_nb.monitor
        >>> for gpu in air_nb.monitor.sample().gpus:
        ...     print(gpu.index, gpu.name, gpu.utilization_percent, gpu.memory_used_bytes)
        0 NVIDIA H100 80GB HBM3 97 64424509440

    Args:
        timeout_s: The longest wait. A driver without persistence mode takes a second and more per GPU to start.

    Returns:
        What the driver says. Never raises for it: without a driver or an answer there are no GPUs, and `driver_state`
        and `reason` say why.
    """
    with Sampler() as sampler:
        return sampler.sample(timeout_s)
