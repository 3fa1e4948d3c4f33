"""Train PyTorch models on many GPUs from a notebook.

``%load_ext air_nb`` adds ``%%distributed`` and ``%air``; ``@distributed`` does the same for functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from air_nb.decorator import distributed

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["__version__", "distributed", "load_ipython_extension", "unload_ipython_extension"]

__version__ = "0.1.0"


def load_ipython_extension(shell: InteractiveShell) -> None:
    """``%load_ext air_nb``: register the magics and warm the launcher in the background."""
    from air_nb.magics import load  # importing air_nb must be cheap, and work without IPython

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """``%unload_ext air_nb``: end the launcher and everything below it."""
    from air_nb.magics import unload

    unload(shell)
