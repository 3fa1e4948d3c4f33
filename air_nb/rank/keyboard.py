"""A rank has no keyboard: what would ask one fails at once, and says where it works.

Its stdin is /dev/null, from which ``input()`` would only report an end of file, and a debugger would quit in its own
frames.
"""

from __future__ import annotations

import bdb
import builtins
import getpass
from typing import Any, NoReturn

__all__ = ["NO_KEYBOARD", "install", "refuse_keyboard"]

NO_KEYBOARD = (
    "ranks have no keyboard: train.func() runs it here, in the kernel, where input(), breakpoint() and %debug work"
)


def refuse_keyboard(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Stand in for whatever would wait for a person.

    Raises:
        EOFError: Always; what ``input()`` raises where nobody can answer, so code that copes with that goes on.
    """
    raise EOFError(NO_KEYBOARD)


def install() -> None:
    """Replace ``input``, ``getpass`` and the door to every debugger; once, in a rank."""
    builtins.input = refuse_keyboard
    getpass.getpass = refuse_keyboard
    # breakpoint(), pdb, IPython's debugger and torch.distributed.breakpoint() all come through here.
    bdb.Bdb.set_trace = refuse_keyboard  # type: ignore[method-assign]
