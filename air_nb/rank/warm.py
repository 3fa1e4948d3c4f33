"""Imported once in the forkserver: what every rank would import for itself. Must not start a thread or touch CUDA."""

from __future__ import annotations

import asyncio
import multiprocessing.connection
import pickle
import sys

import cloudpickle
import IPython.core.completer  # the kernel's warning filters name a class of it
import numpy as np
import threadpoolctl
import torch
import torch.distributed
import torch.utils.data

from air_nb.rank.shell import build_shell

__all__ = ["IPython", "asyncio", "cloudpickle", "multiprocessing", "np", "pickle", "shell", "thread_pools", "torch"]

shell = build_shell()
# IPython's mark of an interactive session, by which Lightning and others refuse to run as one of several processes.
sys.__dict__.pop("ps1", None)
shell.run_cell("pass")  # the first cell of a shell costs 10 ms more than the others
shell.format_failure(RuntimeError())  # so does the first traceback, 18 ms

thread_pools = threadpoolctl.ThreadpoolController()
"""The native libraries loaded here; looking for them takes 13 ms, too long to be done in every rank."""
