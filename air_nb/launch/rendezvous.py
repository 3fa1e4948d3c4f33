"""Rendezvous of one node whose topology is known: a new store for every attempt, bound to loopback only.

torch's own handlers open stores on every interface, and reuse the store of a failed attempt, with which gloo can't
restart (measured: 6 of 6 restarts fail). A socket that we bind ourselves cures both, and no port is ever guessed.
"""

from __future__ import annotations

import socket

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but not listed
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

__all__ = ["LoopbackRendezvous"]

_LOOPBACK = "127.0.0.1"
_BACKLOG = 1024


class LoopbackRendezvous(RendezvousHandler):
    """One node, which hosts the store; ranks connect as clients (``TORCHELASTIC_USE_AGENT_STORE``)."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    # What follows is documented by the interface: torch.distributed.elastic.rendezvous.RendezvousHandler.

    def get_backend(self) -> str:  # noqa: D102
        return "air_nb"

    @property
    def use_agent_store(self) -> bool:  # noqa: D102
        return True

    def next_rendezvous(self) -> RendezvousInfo:  # noqa: D102
        self._store = _bound_store()
        address = RendezvousStoreInfo(_LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore("air_nb/agent", self._store), 0, 1, address)

    def is_closed(self) -> bool:  # noqa: D102
        return False

    def set_closed(self) -> None:  # noqa: D102
        pass

    def num_nodes_waiting(self) -> int:  # noqa: D102
        return 0

    def get_run_id(self) -> str:  # noqa: D102
        return self._run_id

    def shutdown(self) -> bool:  # noqa: D102
        self._store = None
        return True


def _bound_store() -> TCPStore:
    with socket.socket() as listener:
        listener.bind((_LOOPBACK, 0))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        return TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
