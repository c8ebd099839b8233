"""The socket at which the ranks meet, or the agents of several nodes: open before any of them starts.

So no rank dials too early, and nobody can take the port in between. Who dials before the store is served there
waits in the queue of the socket.
"""

from __future__ import annotations

import contextlib
import select
import socket

from allranks import routes
from allranks.errors import LaunchError

_BACKLOG = 4096


def listen(address: str, port: int | None) -> socket.socket:
    """Listen on a port, a free one if None.

    Raises:
        LaunchError: the port is in use, or the address is not of this machine.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, port or 0, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen(_BACKLOG)
            undo.pop_all()
            return listener
    except OSError as error:
        raise LaunchError(
            f"cannot listen on {address}:{port or 0}",
            why=error.strerror or str(error),
            fix="leave out launch.master_port (--master-port, MASTER_PORT): a free port is taken then"
            if port
            else "launch.master_addr (--master-addr, MASTER_ADDR) must be an address of this machine",
        ) from error


def listen_everywhere(port: int | None) -> socket.socket:
    """Listen on a port of all of this machine's addresses, of both families where it has both; a free one if None.

    Raises:
        LaunchError: the port is in use, or no port is free.
    """
    try:
        return routes.listen_everywhere(port or 0, _BACKLOG)
    except OSError as error:
        raise _taken(port, error, "end what holds so many ports of this machine") from error


def listen_for(master: str, port: int | None) -> socket.socket:
    """Listen where the agents of other nodes dial: see :func:`allranks.routes.listen_for`.

    Raises:
        LaunchError: the port is in use.
    """
    try:
        return routes.listen_for(master, port or 0, _BACKLOG)
    except OSError as error:
        raise _taken(port, error, "launch.master_port (--master-port) must be a free port of node 0") from error


def _taken(port: int | None, error: OSError, fix: str) -> LaunchError:
    why = error.strerror or str(error)
    return LaunchError(f"cannot listen on port {port or 0} of this machine", why=why, fix=fix)


def has_caller(listener: socket.socket) -> bool:
    """Tell whether somebody has dialled and waits for an answer."""
    poll = select.poll()  # Not select(), which knows no descriptors above 1023: node 0 may hear many others.
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))


def port_of(listener: socket.socket) -> int:
    """Return the port that a socket listens on."""
    port: int = listener.getsockname()[1]
    return port
