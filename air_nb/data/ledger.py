"""The ledger of a cache: a few numbers in one file, for all processes of the node.

Bytes of the objects and bytes promised to downloads are for who holds the cache's lock, and changed by them alone. How
often anything was evicted, and until when somebody waits for files that are being read, is for readers without a lock.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

__all__ = ["Ledger", "look", "open_ledger"]

_SIZES = struct.Struct("<qq")
_EVICTIONS = struct.Struct("<qq")
_EVICTIONS_AT = _SIZES.size
_COUNT_BYTES = 8  # the first number of _EVICTIONS


class Ledger:
    """Reads and writes the ledger. Holds no state of its own. The caller has the lock of the cache.

    Args:
        cache: The cache's directory.
    """

    def __init__(self, cache: str) -> None:
        self.path = Path(cache, "ledger")

    def sizes(self) -> tuple[int, int] | None:
        """Bytes of the objects, and bytes promised to downloads; None: it is not there, or not whole."""
        try:
            stored, incoming = _SIZES.unpack_from(self.path.read_bytes())
        except (FileNotFoundError, struct.error):
            return None
        return stored, incoming

    def set_sizes(self, stored: int, incoming: int) -> None:
        """Write both."""
        self._enter(_SIZES.pack(stored, incoming), 0)

    def count_eviction(self) -> None:
        """Let processes look again whether files are there that they have seen. Called before the first one goes."""
        count, until_ns = self._evictions()
        self._enter(_EVICTIONS.pack(count + 1, until_ns), _EVICTIONS_AT)

    def ask_for_room(self, for_s: float) -> None:
        """Let processes announce one file at a time for a while: else one that only reads could keep all for ever."""
        count, _ = self._evictions()
        self._enter(_EVICTIONS.pack(count, time.time_ns() + int(for_s * 1e9)), _EVICTIONS_AT)

    def _evictions(self) -> tuple[int, int]:
        try:
            count, until_ns = _EVICTIONS.unpack_from(self.path.read_bytes(), _EVICTIONS_AT)
        except (FileNotFoundError, struct.error):
            return time.time_ns(), 0  # no number that anybody has seen in a ledger before this one
        return count, until_ns

    def _enter(self, content: bytes, at: int) -> None:
        # 16 bytes: written whole or, where the process is killed before, not at all.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, content, at)
        finally:
            os.close(descriptor)


def look(descriptor: int) -> tuple[bytes, bool]:
    """How often anything was evicted (to be compared, not counted), and whether somebody waits for room.

    Args:
        descriptor: What ``open_ledger`` returned.
    """
    entry = os.pread(descriptor, _EVICTIONS.size, _EVICTIONS_AT)
    is_waited_for = len(entry) == _EVICTIONS.size and _EVICTIONS.unpack(entry)[1] > time.time_ns()
    return entry[:_COUNT_BYTES], is_waited_for


def open_ledger(cache: str) -> int:
    """Open the ledger of a cache to look into it; made if it is not there yet."""
    return os.open(Ledger(cache).path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
