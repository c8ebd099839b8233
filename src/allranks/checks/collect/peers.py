"""Connections between two nodes of a probe, which exchange lines of text.

They first prove that they belong to this probe: each shows a half of the request's word that only they know, and not
the same half, so that an echo proves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable

#: Seconds in which a peer must answer: packets that get no answer are sent again after 1 and 3 s.
ANSWER_SECONDS = 5.0
_LONGEST_LINE = 1 << 20
_STRANGER = "another program listens there:"


class PeerError(Exception):
    """Why two nodes cannot connect; ``kind`` is refused, dropped, route, name, stranger, closed or other."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Peer:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(ANSWER_SECONDS)
        self._lines = connection.makefile("r", encoding="utf-8", errors="replace", newline="\n")

    def send(self, text: str) -> None:
        """Send a line."""
        self._connection.sendall(f"{text}\n".encode())

    def read(self, seconds: float | None = None) -> str:
        """Wait for a line, and set another time limit first if one is given; empty: the connection is closed."""
        if seconds is not None:
            self._connection.settimeout(seconds)
        return self._lines.readline(_LONGEST_LINE).strip()

    @property
    def address(self) -> str:
        """The address of the other end."""
        return str(self._connection.getpeername()[0]).removeprefix("::ffff:")

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self._connection.close()


def connect(address: str, port: int, word: str, node: int) -> Peer:
    """Connect to a node, and have it prove that it belongs to the same probe.

    Raises:
        PeerError: why that failed.
    """
    try:
        connection = socket.create_connection((address, port), ANSWER_SECONDS)
    except OSError as error:
        raise _why(error) from None
    if connection.getsockname() == connection.getpeername():  # TCP can connect a port of its own to itself.
        connection.close()
        raise _why(ConnectionRefusedError(errno.ECONNREFUSED, ""))
    peer, middle = Peer(connection), len(word) // 2
    why = PeerError("closed", "the listener there closes the connection without an answer")
    try:
        peer.send(f"{word[:middle]} {node}")
        if (heard := peer.read()) == word[middle:]:
            return peer
        if heard:
            why = PeerError("stranger", f"{_STRANGER} it says {heard[:40]!r}")
    except OSError as error:
        if isinstance(error, TimeoutError):
            why = PeerError("stranger", f"{_STRANGER} it sends nothing for {ANSWER_SECONDS:g} s")
    peer.close()
    raise why


def accept(connection: socket.socket, word: str) -> tuple[Peer, int] | None:
    """Let a peer prove that it belongs to this probe, and prove it to the peer; None for a stranger."""
    peer, middle = Peer(connection), len(word) // 2
    with contextlib.suppress(OSError):  # It says nothing, or is gone: a stranger.
        proof, _, node = peer.read().partition(" ")
        if proof == word[:middle] and node.isdecimal():
            peer.send(word[middle:])
            return peer, int(node)
    peer.close()
    return None


def serve(listener: socket.socket, each: Callable[[socket.socket], None]) -> None:
    """Accept connections in a thread, until :func:`stop`; each is handled in a thread of its own."""

    def accept_all() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=each, args=(connection,), daemon=True).start()

    threading.Thread(target=accept_all, daemon=True).start()


def stop(listener: socket.socket) -> None:
    """Accept no more connections: closing alone would not wake a thread that waits for one."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _why(error: OSError) -> PeerError:
    if isinstance(error, socket.gaierror):
        return PeerError("name", f"cannot resolve the name: {error.strerror}")
    if isinstance(error, ConnectionRefusedError):
        return PeerError("refused", "connection refused")
    if isinstance(error, TimeoutError):
        return PeerError("dropped", f"no answer within {ANSWER_SECONDS:g} s")
    kind = "route" if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH) else "other"
    return PeerError(kind, os.strerror(error.errno).lower() if error.errno else str(error))
