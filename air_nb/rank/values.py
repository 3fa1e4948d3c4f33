"""Captured objects into the rank, values and exceptions out of it, as bundles in the run directory."""

from __future__ import annotations

import warnings
from pickle import PicklingError
from typing import TYPE_CHECKING, Any

from air_nb.errors import CaptureError, Uncapturable
from air_nb.protocol.bundle import Bundle
from air_nb.protocol.names import ERROR, RESULT, WARNING_FILTERS
from air_nb.protocol.pickling import ShippedRegistry, freeze_values, thaw
from air_nb.protocol.task import PAYLOAD_FILE

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RankValues"]


class RankValues:
    """What goes in and out of this rank; remembers what came from the kernel, so that it can go back as a reference."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._registry = ShippedRegistry()

    def read_payload(self, main_globals: dict[str, Any]) -> dict[str, Any]:
        """The captured names; the kernel's warning filters are put in place."""
        bundle = Bundle.open(self._directory / PAYLOAD_FILE)
        names = thaw(bundle, main_globals=main_globals, registry=self._registry)
        filters = names.pop(WARNING_FILTERS, None)
        if filters is not None:
            warnings.resetwarnings()  # also makes modules forget which of their warnings were shown
            warnings.filters.extend(filters)  # type: ignore[attr-defined]  # typeshed has it as a sequence
        return names

    def write_values(self, values: dict[str, Any]) -> None:
        """Write what the kernel asked for.

        Raises:
            PicklingError: A value can't be pickled; it names the value.
            OSError: The run directory can't take it, on a full disk mostly.
        """
        if not values:
            return
        try:
            bundle = freeze_values(values, registry=self._registry)
        except CaptureError as error:
            raise _unreturnable(error.problems[0]) from None
        try:
            bundle.write(self._directory / f"rank_{self._rank}.result")
        except OSError as error:
            raise OSError(error.errno, _unwritable(error, bundle.nbytes, self._directory)) from None

    def write_exception(self, error: BaseException) -> None:
        """Write the exception for the kernel's ``__cause__``, if its pickle can be loaded again here."""
        path = self._directory / f"rank_{self._rank}.error"
        try:
            bundle = freeze_values({ERROR: error}, registry=self._registry)
            thaw(bundle, shipped=self._registry.table())
            bundle.write(path)
        except Exception:  # noqa: BLE001 - the user's class may raise anything when it is rebuilt
            return  # the report, which is on its way, has its type, text and traceback


def _unreturnable(problem: Uncapturable) -> PicklingError:
    what = "the result" if problem.name == RESULT else f"`{problem.name}`"
    return PicklingError(
        f"{what} ({problem.type_name}) can't be sent back from the rank: {problem.reason}. "
        "Return what can be pickled instead: numbers, arrays, tensors, a state_dict, the path of a file."
    )


def _unwritable(error: OSError, nbytes: int, directory: Path) -> str:
    return (
        f"the result of {nbytes / 2**20:,.1f} MiB can't be written to {directory}: {error.strerror}. "
        "Make room there, return less, or set AIR_NB_HOME to a directory on another disk"
    )
