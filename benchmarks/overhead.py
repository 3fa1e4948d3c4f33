"""Steps per second of a small DDP loop: does it cost anything to run inside a notebook's rank?"""

from __future__ import annotations

import re

from benchmarks.report import Report, Settings
from benchmarks.tools import AirNb, Tool, Torchrun, ready_kernels

__all__ = ["run"]

_RANKS = 2
_LIMIT_S = 240.0
_RATE = re.compile(r"<(\d+\.\d+) steps/s>")


def _training(group: str, steps: int) -> str:
    return f"""{group}import time, torch
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, labels = torch.randn(64, 256), torch.randint(10, (64,))
def step():
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss
for _ in range(50):
    step()
started = time.perf_counter()
for number in range({steps}):
    loss = step()
    if number % 50 == 0:
        print(f"step {{number}}: loss {{loss.item():.4f}}")
if rank == 0:
    print(f"<{{{steps} / (time.perf_counter() - started):.3f}} steps/s>", flush=True)
dist.barrier()
"""


def run(settings: Settings) -> Report:
    """Measure, the order of the two changing from round to round."""
    report = Report("overhead")
    tools: list[Tool] = [AirNb(), Torchrun()]
    with ready_kernels(tools, _RANKS) as kernels:
        for repeat in settings.rounds:
            for tool in tools if repeat % 2 == 0 else tools[::-1]:
                kernel = kernels[tool]
                code = _training(tool.group, 100 if settings.quick else 2000)
                cell = kernel.ok(tool.cell(code, _RANKS, kernel.cwd), timeout_s=_LIMIT_S)
                match = _RATE.search(cell.text)
                rate = float(match.group(1)) if match else None
                report.add(f"DDP loop, {_RANKS} ranks, gloo", "speed", tool.name, rate, "steps/s", repeat=repeat)
    return report
