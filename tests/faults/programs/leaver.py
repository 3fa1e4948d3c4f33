"""Leaves behind everything that a rank can leave behind, then says so. Imported by a rank."""

import os
import subprocess
import sys
import time

import torch.utils.data


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.05)
        return index


def leave(directory):
    held = [iter(torch.utils.data.DataLoader(Slow(), num_workers=2))]
    next(held[0])
    held.append(subprocess.Popen(["sleep", "600"]))
    held.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
    daemon = os.path.join(os.path.dirname(__file__), "daemon.py")
    mark = os.path.join(directory, f"daemon_{os.environ['RANK']}")
    held.append(subprocess.Popen([sys.executable, daemon, mark], stdout=subprocess.PIPE))
    while not (os.path.exists(mark) and os.path.getsize(mark)):
        time.sleep(0.01)
    return held
