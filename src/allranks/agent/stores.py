"""The store at which the ranks of a generation meet: it listens before they start, and needs torch once one connects.

Until then the kernel keeps whoever connects waiting, and ranks that never connect do not wait for an import of torch.

torchrun lets all generations share one store: keys of the generation that died can then block or mislead the next one.
Here every generation has a new store, in which there is no key of an earlier one.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from allranks import contract
from allranks.agent.listener import has_caller, listen, listen_everywhere, port_of
from allranks.agent.torch_import import TorchImport

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


class Stores:
    """Serves the store of one generation of ranks after the other, on this node.

    Args:
        torch: the import of torch; it begins when a rank connects, unless it is over by then.
        port: of all stores; None: each has a free one.
    """

    def __init__(self, torch: TorchImport, port: int | None = None) -> None:
        self._torch = torch
        self._port = port
        self._address = ""
        self._listener: socket.socket | None = None
        self._store: TCPStore | None = None
        self._has_loss = False

    def open(self, address: str | None) -> int:
        """Open a new store in place of the last one; return its port.

        Args:
            address: of this machine, at which all ranks reach it; None if they do so at several.

        Raises:
            LaunchError: the port is not free, or torch cannot be imported.
        """
        self.close()
        self._address = address or "127.0.0.1"
        self._listener = listen(address, self._port) if address else listen_everywhere(self._port)
        port = port_of(self._listener)
        self.tick()
        return port

    def tick(self) -> None:
        """Begin to import torch if a rank has connected, in a thread; serve the store once that is over.

        Raises:
            LaunchError: torch cannot be imported.
        """
        if self._listener is None:
            return
        if self._torch.is_over:
            self._serve(self._listener)
        elif not self._torch.has_begun and has_caller(self._listener):
            self._torch.begin()

    @property
    def was_used(self) -> bool:
        """Whether the ranks have met: a process group leaves keys in the store that it was formed at."""
        if self._listener is not None:
            return has_caller(self._listener)
        return self._store is not None and self._store.num_keys() > 0

    def tell_of_loss(self) -> None:
        """Tell the ranks that one of them is gone, so that they do not wait for it."""
        self._has_loss = True
        if self._store is not None:
            self._store.set(contract.RANK_GONE, "1")

    def close(self) -> None:
        """Close the last store: a fixed port is free again only when it is gone."""
        if self._listener is not None:
            self._listener.close()
        self._listener = self._store = None
        self._has_loss = False

    def _serve(self, listener: socket.socket) -> None:
        self._listener = None  # Before anything is raised: this is tried once.
        with listener:
            self._torch.finish()
            self._store = _serve(self._address, port_of(listener), listener.detach())
        if self._has_loss:
            self.tell_of_loss()


def _serve(address: str, port: int, descriptor: int) -> TCPStore:
    """Serve a store on a socket that listens."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

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
