"""Crash at each I/O call of a save, one after the other, and see what is restored afterwards.

Run under LD_PRELOAD=crash_at.so with a folder and "async" or "sync"; prints a line of JSON for each crash.
"""

import contextlib
import ctypes
import io
import json
import os
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

from air_nb.checkpoint import CheckpointManager, list_checkpoints
from tests.support.trainings import full_state

torch.set_num_threads(1)
shim = ctypes.CDLL(None)


def parts(seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(root, step, asynchronous):
    model, optimizer = parts(step)
    manager = CheckpointManager(root, model=model, optimizer=optimizer, keep=2, asynchronous=asynchronous)
    manager.save(step)
    manager.close()


def restored(root):
    model, optimizer = parts(99)
    manager = CheckpointManager(root, model=model, optimizer=optimizer, resume="must")
    with contextlib.redirect_stdout(io.StringIO()):
        step = manager.restore()
    manager.close()
    return step, full_state(model, optimizer) == full_state(*parts(step))


def main(folder, mode):
    base, root = folder / "base", folder / "root"
    for step in (1, 2):
        save(base, step, False)
    for at in range(1, 10_000):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(base, root)
        child = os.fork()
        if child == 0:
            shim.crash_arm(str(root).encode(), ctypes.c_long(at))
            save(root, 3, mode == "async")
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        is_committed = any((path / "COMMIT").exists() for path in root.glob("step_3.*"))
        step, is_same = restored(root)
        save(root, 4, False)
        left = {info.step: str(info.state) for info in list_checkpoints(root)}
        print(
            json.dumps({"code": code, "committed": is_committed, "step": step, "same": is_same, "left": left}),
            flush=True,
        )
        if code != 77:
            return


main(Path(sys.argv[1]), sys.argv[2])
