"""Rendezvous of the agents, and a store of its own for each generation of ranks.

torchrun lets all generations share one store: keys of the generation that died can then block or mislead the
next one. Here every generation gets a new store, so there is no key it could find.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from functools import partial

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from allranks.agent.listener import listen, port_of


class OneNodeRendezvous(RendezvousHandler):
    """The rendezvous of a job of one node: it meets nobody, and hosts the store of each generation.

    Args:
        run_id: prefix of the keys.
        master_addr: address that the store listens on and that the ranks get as MASTER_ADDR.
        master_port: port, or None for a free one in each generation.
        listener: the socket of the first generation, if it is open already.
    """

    def __init__(
        self, run_id: str, master_addr: str, master_port: int | None, listener: socket.socket | None = None
    ) -> None:
        self._run_id = run_id
        self._address = master_addr
        self._port = master_port
        self._listener = listener
        self._generation = -1
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name that torch's events carry."""
        return "allranks"

    @property
    def use_agent_store(self) -> bool:
        """Tell the ranks that they are all clients of the agent's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store of the next generation.

        Raises:
            LaunchError: the port is in use, or the address is not of this machine.
        """
        self._generation += 1
        self._store = None  # Closes the last one, so that a fixed port is free again.
        listener, self._listener = self._listener or listen(self._address, self._port), None
        port = port_of(listener)
        self._store = serve(self._address, port, listener.detach())
        store = PrefixStore(f"{self._run_id}/agents/{self._generation}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._address, port))

    def is_closed(self) -> bool:
        """Tell that it can always go on."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is nobody to tell."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no node ever joins."""
        return 0

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True


def serve(address: str, port: int, descriptor: int) -> TCPStore:
    """Serve a store on a socket that listens."""
    make = partial(
        TCPStore,
        address,
        port,
        None,
        is_master=True,
        timeout=timedelta(minutes=5),
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
    try:
        return make()
    except NotImplementedError:
        # The libuv server, the default since torch 2.4, takes an open socket only since a later version.
        return make(use_libuv=False)
