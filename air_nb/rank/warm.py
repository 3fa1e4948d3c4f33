"""Imported once in the forkserver: what every rank would otherwise import for itself. Must not start a thread or touch CUDA."""

from __future__ import annotations

import asyncio
import multiprocessing.connection
import pickle

import cloudpickle
import numpy
import threadpoolctl
import torch
import torch.distributed
import torch.utils.data

from air_nb.rank.shell import build_shell

__all__ = ["asyncio", "cloudpickle", "multiprocessing", "numpy", "pickle", "shell", "threadpoolctl", "torch"]

shell = build_shell()
