"""Gives up what a forked child of the kernel must not keep: pipes to our processes, locks on GPUs.

A cell may call ``os.fork`` or use multiprocessing's fork method. The child then has our descriptors: it would keep a
launcher's pipe or a GPU lock alive after the kernel, and its exit handlers would close what is still the kernel's.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["abandon_in_children"]


class _Owner(Protocol):
    def abandon(self) -> None:
        """Close the descriptors, signal nobody, and be empty from now on. Runs in the forked child."""


_owners: weakref.WeakSet[_Owner] = weakref.WeakSet()


def abandon_in_children(owner: _Owner) -> None:
    """Have the owner's ``abandon`` called in every child that this process forks while the owner is alive.

    Args:
        owner: What holds descriptors.
    """
    _owners.add(owner)


def _abandon_all() -> None:
    for owner in list(_owners):
        owner.abandon()
    _owners.clear()


os.register_at_fork(after_in_child=_abandon_all)
