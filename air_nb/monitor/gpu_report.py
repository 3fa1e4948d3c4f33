"""What was seen of the GPUs at one moment: plain values that cross from the sampling process to the kernel.

Unknown is None, never 0: a driver that does not tell the utilisation must not look like an idle GPU. This module
imports nothing of ours and runs in both processes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

__all__ = ["DriverState", "GpuProcess", "GpuReport", "GpuSample", "GpuState", "utc_now"]


class GpuState(StrEnum):
    """How one GPU answered. Read afresh at every sample; any state can follow any other."""

    OK = "ok"
    LOST = "lost"
    """The driver no longer reaches it (it fell off the bus); it comes back after a reset or a reboot."""
    ERROR = "error"
    """It answered with another error, which the reason names."""


class DriverState(StrEnum):
    """How the driver as a whole answered. NO_DRIVER and NO_LIBRARY are final for one sampler, the others are not."""

    OK = "ok"
    NO_DRIVER = "no_driver"
    """The library is there, the kernel module is not loaded."""
    NO_LIBRARY = "no_library"
    """There is no libnvidia-ml.so.1: a machine without an NVIDIA driver."""
    TIMEOUT = "timeout"
    """No answer in time; the GPUs are those of the last good sample, taken at `GpuReport.at`."""
    ERROR = "error"
    """It failed in another way, which the reason names; the GPUs are those of the last good sample."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU.

    Attributes:
        pid: As the driver numbers it: in a container that is the host's number, and name and user stay unknown.
        used_bytes: GPU memory that it holds.
        name: Name of its program.
        user: Name of its owner.
    """

    pid: int
    used_bytes: int | None = None
    name: str | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one moment.

    Attributes:
        index: NVML's number of it, which is the order of ``nvidia-smi``.
        uuid: What CUDA_VISIBLE_DEVICES accepts; unknown if the GPU was never reached.
        name: Product name, such as "NVIDIA H100 80GB HBM3".
        state: Whether the other values can be relied on.
        reason: Why the state is not OK.
        utilization_percent: Part of the last sample period in which any kernel ran.
        memory_used_bytes: In use by processes, without the driver's own reserve where the driver tells them apart.
        memory_total_bytes: Size of its memory.
        temperature_celsius: Of the chip.
        power_watts: Drawn now.
        power_limit_watts: Drawn at most.
        clock_sm_mhz: Of its processors, now.
        throttle_reasons: Why the clock is below its maximum, as words of `air_nb.monitor.throttle`.
        mig: Whether it is split into MIG devices.
        processes: Those that hold its memory, the largest first.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    state: GpuState = GpuState.OK
    reason: str | None = None
    utilization_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    clock_sm_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    mig: bool | None = None
    processes: tuple[GpuProcess, ...] = ()

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Rebuild a sample from what `GpuReport.to_json` made of it."""
        processes = tuple(GpuProcess(**each) for each in fields["processes"])
        reasons = fields["throttle_reasons"]
        changed = {
            "state": GpuState(fields["state"]),
            "processes": processes,
            "throttle_reasons": None if reasons is None else tuple(reasons),
        }
        return cls(**{**fields, **changed})


@dataclass(frozen=True, slots=True)
class GpuReport:
    """All GPUs of this machine at one moment.

    Attributes:
        at: When the GPUs were sampled (UTC): older than now if the driver did not answer this time.
        driver_state: Whether it answered.
        reason: Why the driver state is not OK, as a sentence part that a user can read.
        driver_version: Such as "570.86.15".
        gpus: By index. Not empty only if this or an earlier sample succeeded.
    """

    at: datetime
    driver_state: DriverState
    reason: str | None = None
    driver_version: str | None = None
    gpus: tuple[GpuSample, ...] = ()

    def age_s(self, now: datetime | None = None) -> float:
        """Seconds since the GPUs were sampled.

        Args:
            now: The time to count to (UTC), by default this moment.
        """
        return ((now or utc_now()) - self.at).total_seconds()

    def to_json(self) -> dict[str, Any]:
        """The report as values that `json.dumps` takes."""
        return {**dataclasses.asdict(self), "at": self.at.isoformat()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Rebuild a report from `to_json`.

        Raises:
            KeyError, TypeError, ValueError: if the fields are not those of a report.
        """
        return cls(
            at=datetime.fromisoformat(fields["at"]),
            driver_state=DriverState(fields["driver_state"]),
            reason=fields["reason"],
            driver_version=fields["driver_version"],
            gpus=tuple(GpuSample.from_json(gpu) for gpu in fields["gpus"]),
        )


def utc_now() -> datetime:
    """This moment, in UTC."""
    return datetime.now(UTC)
