"""What can only be seen on a GPU, in one short run: `python -m benchmarks.gpu_check`.

A kernel that has initialised CUDA launches ranks with a GPU of their own; tensors on a GPU travel both ways; the
forkserver stays without CUDA after its idle imports; memory is free again after an interrupt and after a `kill -9`.
Prints one JSON line per check and ends with 1 if one failed. `AIR_NB_DEVICE=cpu` tries the script itself without a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from air_nb.monitor.sampler import Sampler
from tests.support.kernel import Kernel, running_kernel

_ON_CPU = os.environ.get("AIR_NB_DEVICE") == "cpu"
_IDLE_S = 3.0  # the forkserver imports torch._dynamo
_FREED_BYTES = 64 << 20  # the driver's own bookkeeping differs by some MiB
_DEVICE = "cpu" if _ON_CPU else "cuda"

_COLLECTIVE = """%%distributed --gpus 1 --out seen
import torch, torch.distributed as dist
from air_nb.runtime import init_process_group
device = init_process_group()
x = torch.ones(4, device=device)
dist.all_reduce(x)
(str(device), dist.get_backend(), x.sum().item())"""
_HOLD = """%%distributed --gpus 1
import os, time, torch
from air_nb.runtime import device
held = torch.ones(1 << 28, device=device())
print("holds", os.getpid())
while True:
    held += 1
    time.sleep(0.01)"""


def main() -> int:
    """Run all checks; 0 if each held."""
    checks: list[tuple[str, Callable[[Kernel], object]]] = [
        ("kernel initialises CUDA", _initialise),
        ("collective on one GPU", _collective),
        ("GPU tensor in and out", _tensors),
        ("launch after the idle imports", _collective_when_idle),
        ("%air gpus", lambda kernel: kernel.ok("%air gpus").text),
        ("memory free after an interrupt", lambda kernel: _freed(kernel, Kernel.interrupt)),
        ("memory free after kill -9 of the rank", lambda kernel: _freed(kernel, _kill_rank)),
        ("no descriptor of the driver in launcher and forkserver", _driver_descriptors),
    ]
    failed = 0
    with tempfile.TemporaryDirectory() as folder, running_kernel(Path(folder)) as kernel:
        for name, check in checks:
            started = time.monotonic()
            try:
                found, ok = check(kernel), True
            except (AssertionError, TimeoutError) as error:
                found, ok = str(error), False
                failed += 1
            seconds = round(time.monotonic() - started, 3)
            print(json.dumps({"check": name, "ok": ok, "found": found, "seconds": seconds}), flush=True)
    return int(failed > 0)


def _initialise(kernel: Kernel) -> str:
    kernel.ok(f"import torch\nt = torch.arange(8.0, device={_DEVICE!r})", timeout_s=120)
    return kernel.value("(torch.cuda.is_initialized(), torch.version.cuda)")


def _collective(kernel: Kernel) -> str:
    kernel.ok(_COLLECTIVE, timeout_s=120)
    seen = kernel.value("seen")
    assert "4.0" in seen, seen
    return seen


def _collective_when_idle(kernel: Kernel) -> str:
    time.sleep(_IDLE_S)
    return _collective(kernel)


def _tensors(kernel: Kernel) -> str:
    kernel.ok("%%distributed --gpus 1 --out back\nfrom air_nb.runtime import device\nt.to(device()) * 2", timeout_s=120)
    back = kernel.value("[(str(b.device), b.sum().item()) for b in back]")
    assert "56.0" in back, back
    return back


def _freed(kernel: Kernel, end: Callable[[Kernel], None]) -> int | None:
    before = _used_bytes()
    cell = kernel.start(_HOLD)
    kernel.follow(cell, until=lambda cell: "holds" in cell.text, timeout_s=120)
    end(kernel)
    kernel.follow(cell)
    assert cell.reply_status == "error", cell.text
    after = _used_bytes()
    if before is None or after is None:
        return None
    assert after - before < _FREED_BYTES, f"{before} bytes in use before, {after} after"
    return after - before


def _kill_rank(kernel: Kernel) -> None:
    # The rank is what is deepest below the kernel: kernel > launcher > forkserver > rank.
    deepest = max(kernel.descendants(), key=lambda process: (len(process.parents()), process.create_time()))
    deepest.kill()


def _used_bytes() -> int | None:
    sampler = Sampler()
    try:
        used = [gpu.memory_used_bytes for gpu in sampler.sample(30.0).gpus]
    finally:
        sampler.close()
    return sum(size for size in used if size is not None) if used else None


def _driver_descriptors(kernel: Kernel) -> list[str]:
    opened = [
        f"{process.pid}: {link}"
        for process in kernel.descendants()
        if "monitor.process" not in " ".join(process.cmdline())
        for link in map(os.readlink, Path(f"/proc/{process.pid}/fd").iterdir())
        if link.startswith("/dev/nvidia")
    ]
    assert not opened, opened
    return opened


if __name__ == "__main__":
    sys.exit(main())
