"""Chooses the GPUs of a run, or says why it can't. Pure: a report goes in, GPUs or a `DeviceError` come out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from air_nb.errors import DeviceError
from air_nb.monitor.gpu_report import DriverState, GpuReport, GpuSample, GpuState
from air_nb.monitor.gpu_type import GpuType, parse_gpu_type
from air_nb.monitor.text import describe_memory, describe_process, plural
from air_nb.monitor.visible import visible_gpus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["choose_gpus"]

_IDLE_STEP_BYTES = 256 << 20  # idle GPUs differ by some MiB of the driver's own: that is no order
_UNKNOWN = float("inf")  # unknown is not idle


def choose_gpus(
    report: GpuReport,
    *,
    gpus: int | None = None,
    gpu_ids: Sequence[str | int] | None = None,
    visible: str | None = None,
    gpu_type: str | None = None,
    taken: Mapping[str, str],
) -> tuple[GpuSample, ...]:
    """The GPUs for the ranks, in rank order.

    Args:
        report: All GPUs of the machine. One without an answer of the driver is used if it has GPUs: the last good
            sample.
        gpus: Take so many, the most idle ones: least memory held, then least utilisation, then the lowest index. They
            are returned in the order of their indices.
        gpu_ids: Take exactly these, in this order: positions in the visible GPUs, or beginnings of UUIDs. With neither
            `gpus` nor `gpu_ids` all visible ones are taken.
        visible: The kernel's own CUDA_VISIBLE_DEVICES; the others are not looked at.
        gpu_type: Take only GPUs of this type (see `parse_gpu_type`).
        taken: UUIDs of GPUs that other runs have locked, and who they are.

    Returns:
        At least one GPU, each with a UUID to put in CUDA_VISIBLE_DEVICES.

    Raises:
        DeviceError: if that is not to be had: what was found, who holds it, and how to run on CPU.
        ValueError: if the type is none, `gpus` is below 1, or both `gpus` and `gpu_ids` are given.
    """
    if gpus is not None and gpus < 1:
        raise ValueError(f"gpus={gpus}: at least 1 is needed")
    if gpus is not None and gpu_ids is not None:
        raise ValueError(f"gpus={gpus} and gpu_ids={tuple(gpu_ids)} exclude each other")
    choice = _Choice(report, visible_gpus(report, visible), visible, taken, gpu_type)
    if not choice.shown:
        raise DeviceError(choice.nothing_there(gpus))
    if gpu_ids is not None:
        return choice.named(gpu_ids)
    count = gpus if gpus is not None or choice.type is None else choice.type.count
    return choice.all() if count is None else choice.most_idle(count)


class _Choice:
    """One choice under way: what is shown, and the texts about it."""

    def __init__(
        self,
        report: GpuReport,
        shown: tuple[GpuSample, ...],
        visible: str | None,
        taken: Mapping[str, str],
        gpu_type: str | None,
    ) -> None:
        self.report = report
        self.shown = shown
        self.visible = visible
        self.taken = taken
        self.type: GpuType | None = None if gpu_type is None else parse_gpu_type(gpu_type)

    def all(self) -> tuple[GpuSample, ...]:
        self._check_count(len(self.shown))
        return self._usable(self.shown, f"all {plural(len(self.shown), 'GPU')} were asked for")

    def named(self, gpu_ids: Sequence[str | int]) -> tuple[GpuSample, ...]:
        chosen = tuple(self._find(each) for each in gpu_ids)
        text = ", ".join(str(each) for each in gpu_ids)
        if not chosen or len({id(gpu) for gpu in chosen}) != len(chosen):
            raise DeviceError(f"GPU ids {text or '(none)'}: name at least one GPU, and each once.")
        self._check_count(len(chosen))
        return self._usable(chosen, f"GPU ids {text} were asked for")

    def most_idle(self, count: int) -> tuple[GpuSample, ...]:
        self._check_count(count)
        of_type = [gpu for gpu in self.shown if self.type is None or self.type.matches(gpu.name)]
        if not of_type:
            raise DeviceError(self._wrong_type(self.shown))
        usable = [gpu for gpu in of_type if self._obstacle(gpu) is None]
        if len(usable) < count:
            kind = "" if self.type is None else f" of type {self.type.text}"
            can = f"{len(usable)} of the {len(self.shown)} here can be used"
            raise DeviceError(self._problem(f"{plural(count, 'GPU')}{kind} {_were(count)} asked for and {can}", count))
        chosen = sorted(usable, key=_busyness)[:count]
        return self._usable(
            tuple(gpu for gpu in usable if gpu in chosen), f"{plural(count, 'GPU')} {_were(count)} asked for"
        )

    def nothing_there(self, count: int | None) -> str:
        wanted = "GPUs" if count is None else plural(count, "GPU")
        if self.report.gpus:
            why = f"CUDA_VISIBLE_DEVICES={self.visible!r} shows none of the {plural(len(self.report.gpus), 'GPU')} here"
        else:
            why = f"there is none here: {self.report.reason or 'the NVIDIA driver reports none'}"
        return f"{wanted} {_were(count)} asked for, and {why}. {_cpu_advice(count)}"

    def _find(self, wanted: str | int) -> GpuSample:
        text = str(wanted)
        if text.isdecimal():
            found = [self.shown[int(text)]] if int(text) < len(self.shown) else []
        else:
            found = [gpu for gpu in self.shown if text and (gpu.uuid or "").lower().startswith(text.lower())]
        if len(found) == 1:
            return found[0]
        what = "is no GPU here" if not found else f"is the beginning of {len(found)} UUIDs"
        raise DeviceError(self._problem(f"GPU id {text} {what}; ids are 0 to {len(self.shown) - 1} or UUIDs", None))

    def _check_count(self, count: int) -> None:
        if self.type is not None and self.type.count not in (None, count):
            raise DeviceError(
                f"GPU type {self.type.text} is {plural(self.type.count or 0, 'GPU')}, "
                f"and {count} {_were(count)} asked for: name one number only, or the type {self.type.model} alone."
            )

    def _usable(self, chosen: tuple[GpuSample, ...], asked: str) -> tuple[GpuSample, ...]:
        """The GPUs themselves, if nothing speaks against any of them."""
        bad = [gpu for gpu in chosen if self._obstacle(gpu) is not None]
        if bad:
            raise DeviceError(self._problem(f"{asked} and {len(bad)} of them can't be used", len(chosen)))
        if self.type is not None and not all(self.type.matches(gpu.name) for gpu in chosen):
            raise DeviceError(self._wrong_type(chosen))
        if len(chosen) > 1 and any(_is_mig_device(gpu) for gpu in chosen):
            raise DeviceError(
                f"CUDA_VISIBLE_DEVICES={self.visible!r} names MIG devices, and a CUDA process sees one of them only: "
                f"ask for 1 GPU, or name whole GPUs. {_cpu_advice(len(chosen))}"
            )
        return chosen

    def _obstacle(self, gpu: GpuSample) -> str | None:
        """Why no rank can run there."""
        if gpu.state is not GpuState.OK:
            return f"{gpu.state} ({gpu.reason})"
        if gpu.uuid is None:
            return "the driver does not tell its UUID"
        if gpu.uuid in self.taken:
            return f"taken by another air_nb run ({self.taken[gpu.uuid]})"
        if gpu.mig and not _is_mig_device(gpu):
            return (
                "in MIG mode: set CUDA_VISIBLE_DEVICES=MIG-... before the kernel starts to use one of its MIG devices"
            )
        return None

    def _wrong_type(self, chosen: Sequence[GpuSample]) -> str:
        assert self.type is not None, "only a type can be wrong"
        names = [gpu.name or "a GPU of unknown type" for gpu in chosen]
        found = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        advice = "Leave the type out to take what is there."
        return f"GPU type {self.type.text} was asked for and this machine has {found}. {advice}"

    def _problem(self, what: str, count: int | None) -> str:
        hidden = len(self.report.gpus) - len(self.shown)
        scope = f" (CUDA_VISIBLE_DEVICES={self.visible!r} hides {hidden} more)" if hidden > 0 else ""
        age = ""
        if self.report.driver_state is not DriverState.OK:
            age = f"\n  (as of {self.report.at:%H:%M:%S} UTC: {self.report.reason})"
        lines = [f"\n  GPU {position}  {self._describe(gpu)}" for position, gpu in enumerate(self.shown)]
        return f"{what}{scope}:{''.join(lines)}{age}\n{_cpu_advice(count)}"

    def _describe(self, gpu: GpuSample) -> str:
        obstacle = self._obstacle(gpu)
        held = "; ".join(describe_process(process) for process in gpu.processes)
        status = obstacle or (f"{describe_memory(gpu)} in use" if gpu.memory_used_bytes is not None else "usable")
        return f"{gpu.name or 'unknown model'}: {status}" + (f", held by {held}" if held else "")


def _busyness(gpu: GpuSample) -> tuple[float, float]:
    """Sorts idle GPUs first; equal ones keep their order.

    In a container the driver names no processes, though the memory in use counts theirs: the larger of the two counts.
    """
    held = [process.used_bytes for process in gpu.processes if process.used_bytes is not None]
    known = [bytes_ for bytes_ in (gpu.memory_used_bytes, sum(held) if held else None) if bytes_ is not None]
    memory = max(known) // _IDLE_STEP_BYTES if known else _UNKNOWN
    return memory, _UNKNOWN if gpu.utilization_percent is None else gpu.utilization_percent


def _is_mig_device(gpu: GpuSample) -> bool:
    return gpu.uuid is not None and gpu.uuid.startswith("MIG-")


def _were(count: int | None) -> str:
    return "was" if count == 1 else "were"


def _cpu_advice(count: int | None) -> str:
    nproc = "N" if count is None else str(count)
    return f"To run on CPU: --device cpu --nproc {nproc}, or set AIR_NB_DEVICE=cpu."
