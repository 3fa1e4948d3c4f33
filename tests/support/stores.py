"""What every store must do, for local directories and for object stores alike."""

from __future__ import annotations

import threading

from air_nb.checkpoint.store import Store

__all__ = ["race_to_create"]


def race_to_create(store: Store, name: str, count: int) -> list[int]:
    """Have ``count`` threads create one file at once; the numbers of those that were told they had."""
    start, won = threading.Barrier(count), []

    def create(number: int) -> None:
        start.wait()
        try:
            store.create(name, b"%d" % number)
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won
