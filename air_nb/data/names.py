"""Under which names the files of a cache lie: as they do below their root, so that a path says what it says there.

What a file is kept as, its object, is named by its key alone. Its name is a second link to it. Two versions of a file
have one name below their root: the second one, as long as the first is there, lies in a directory of its own. So a name
alone does not tell which version it is of; whether it is a link to the object does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from air_nb.data.ledger import Ledger

__all__ = ["Names"]


class Names:
    """The objects and names of one cache directory. Holds no state of its own.

    Args:
        cache: The cache's directory.
        ledger: Its ledger.
    """

    def __init__(self, cache: str, ledger: Ledger) -> None:
        self._cache = cache
        self._ledger = ledger

    def object_path(self, key: str) -> str:
        """Where a file is kept."""
        return f"{self._cache}/objects/{key[:2]}/{key}"

    def possible(self, key: str, root: str, path: str) -> tuple[str, str]:
        """The two names that a file may have: that below its root and, where that is taken, one of its own.

        Args:
            key: Of the object.
            root: What tells roots apart, not a key.
            path: Its name below the root.
        """
        return f"{self._cache}/paths/{root}/{path}", f"{self._cache}/paths/{key}/{path}"

    def is_of(self, key: str, status: os.stat_result) -> bool:
        """Whether a file is that object, and not another version.

        Args:
            key: Of the object.
            status: Of the file.
        """
        try:
            return os.path.samestat(os.stat(self.object_path(key)), status)  # noqa: PTH116 - pathlib takes twice as long
        except FileNotFoundError:
            return False

    # -- the rest is called with the lock of the cache held ----------------------------------------------------------

    def of(self, key: str, names: Iterable[str]) -> list[str]:
        """Those of the names that an object has."""
        return [name for name in names if self._has(key, name)]

    def give(self, key: str, names: Sequence[str]) -> str:
        """Give an object the first name that it can have, unless it has one.

        Returns:
            The name that it has.
        """
        for name in self.of(key, names):
            return name
        return next(name for name in names if self._take(key, name, is_last=name == names[-1]))

    def all(self) -> dict[int, list[str]]:
        """The names of all objects, by inode."""
        names: dict[int, list[str]] = {}
        waiting = [f"{self._cache}/paths"]
        while waiting:
            for entry in os.scandir(waiting.pop()):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    names.setdefault(entry.stat(follow_symlinks=False).st_ino, []).append(entry.path)
        return names

    def delete(self, key: str, names: Iterable[str]) -> None:
        """Delete an object with the names that it has."""
        # An object without a name is found by the next scan, a name without an object is not: so in this order.
        for name in names:
            Path(name).unlink(missing_ok=True)
            self._remove_empty(Path(name).parent)
        Path(self.object_path(key)).unlink(missing_ok=True)

    def _has(self, key: str, name: str) -> bool:
        try:
            return self.is_of(key, Path(name).stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _take(self, key: str, name: str, *, is_last: bool) -> bool:
        """Give an object a name; False if it is another's. The last one is its own, whatever has it."""
        path = Path(name)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.is_file() and (is_last or path.stat().st_nlink == 1):  # somebody has deleted the object of the name
                self._ledger.count_eviction()
                path.unlink()
            os.link(self.object_path(key), name)
        except (FileExistsError, NotADirectoryError):  # in a store a name may also be that of a directory
            if is_last:
                raise
            return False
        return True

    def _remove_empty(self, directory: Path) -> None:
        """Delete a directory of names, and those above it, as far as nothing is in them."""
        top = Path(self._cache, "paths")
        with contextlib.suppress(OSError):  # not empty
            while directory != top:
                directory.rmdir()
                directory = directory.parent
