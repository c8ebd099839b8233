"""The rendezvous store of a generation of ranks, a TCPStore. It listens before the ranks start.

So no rank connects too early, and no other process can take the port in between. The kernel queues connections until
the store is served; torch is imported only when a rank connects, so ranks that never do need not wait for it.

torchrun shares one store between all generations: keys of a dead generation can then block or mislead the next one.
Here each generation has a new, empty store.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.agent.heartbeat import complain
from allranks.errors import LaunchError
from allranks.system import routes

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

BACKLOG = 4096


class Stores:
    """Serves the store of each generation in turn, at a fixed port or, if that is None, each at a free one."""

    def __init__(self, port: int | None = None) -> None:
        self._port = port
        self._address = ""
        self._listener: socket.socket | None = None
        self._store: TCPStore | None = None
        self._has_loss = False
        self._import: threading.Thread | None = None
        self._is_import_over = False
        self._import_error: Exception | None = None

    def import_torch(self) -> None:
        """Import torch if needed, or wait for the thread that does; raise a LaunchError if that fails."""
        if self._import:
            self._import.join()
        elif not self._is_import_over:
            self._import_torch()
        if self._import_error:
            fix = "install torch there, or name the environment that has it: environment.venv, .conda or .python"
            active = os.environ.get("VIRTUAL_ENV", "")
            if active and Path(active).resolve() != Path(sys.prefix).resolve():
                fix += f"; active is {active}"
            what = f"{sys.executable} cannot import torch"
            raise LaunchError(what, why=str(self._import_error), fix=fix) from self._import_error

    def open(self, address: str | None) -> int:
        """Replace the store by a new one; return its port.

        ``address`` is the address of this machine at which all ranks connect; None listens on all addresses.

        Raises:
            LaunchError: the port is not free, or torch cannot be imported.
        """
        self.close()
        self._address = address or "127.0.0.1"
        self._listener = listen(address, self._port)
        port: int = self._listener.getsockname()[1]
        self.tick()
        return port

    def tick(self) -> None:
        """Import torch in a thread once a rank connects, then serve the store; raise a LaunchError if that fails."""
        if self._listener is None:
            return
        if not self._is_import_over:
            if self._import is None and has_caller(self._listener):
                self._import = threading.Thread(target=self._import_torch, name="import torch", daemon=True)
                self._import.start()
            return
        listener, self._listener = self._listener, None  # Before anything can raise: serving is tried only once.
        with listener:
            self.import_torch()
            self._store = _serve(self._address, listener)
        if self._has_loss:
            self.report_loss()

    @property
    def was_used(self) -> bool:
        """Whether the ranks have formed a process group, which leaves keys in the store."""
        if self._listener is not None:
            return has_caller(self._listener)
        return self._store is not None and self._store.num_keys() > 0

    def report_loss(self) -> None:
        """Tell the ranks through the store that one of them is gone, so that they do not wait for it."""
        self._has_loss = True
        if self._store is not None:
            self._store.set(contract.RANK_GONE, "1")

    def close(self) -> None:
        """Close the current store, which frees a fixed port."""
        if self._listener is not None:
            self._listener.close()
        self._listener = self._store = None
        self._has_loss = False

    def _import_torch(self) -> None:
        gc.disable()  # Each collection of torch's objects takes 0.1 s.
        try:
            import torch.distributed  # noqa: F401
        except Exception as error:  # noqa: BLE001 - a library of torch's that is missing or broken raises anything
            complain()
            self._import_error = error
        finally:
            gc.freeze()
            gc.enable()
            self._is_import_over = True


def _serve(address: str, listener: socket.socket) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    make = partial(
        TCPStore,
        address,
        listener.getsockname()[1],
        None,
        is_master=True,
        timeout=timedelta(minutes=5),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        return make()
    except NotImplementedError:
        # The libuv server, the default since torch 2.4, takes an open socket only since a later version.
        return make(use_libuv=False)


def listen(address: str | None, port: int | None) -> socket.socket:
    """Listen on a port (None: a free one) of a local address (None: all); raise a LaunchError if that fails."""
    where = f"{address}:{port or 0}"
    fix = "launch.master_addr (--master-addr, MASTER_ADDR) must be an address of this machine"
    if address is None:
        where, fix = f"port {port or 0} of this machine", "stop what uses so many ports of this machine"
    elif port:
        fix = "leave out launch.master_port (--master-port, MASTER_PORT): a free port is taken then"
    try:
        if address is None:
            return routes.listen_everywhere(port or 0, BACKLOG)
        family, _, _, _, target = socket.getaddrinfo(address, port or 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(target, family=family, backlog=BACKLOG)
    except OSError as error:
        why = str(error.strerror or error).partition(" (while attempting")[0]  # Python adds the address.
        raise LaunchError(f"cannot listen on {where}", why=why, fix=fix) from error


def has_caller(listener: socket.socket) -> bool:
    """Return whether a connection waits to be accepted."""
    poll = select.poll()  # Not select(), which is limited to descriptors below 1024: node 0 may have many connections.
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))
