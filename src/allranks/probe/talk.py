"""How processes that look at nodes talk with each other: lines of text, and first of all who they are.

Each shows a part of the word that only they know, and not the same part: who repeats what it hears proves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable

#: After which nobody is going to answer: packets that get no answer are sent again after 1 and 3 s.
ANSWER_SECONDS = 5.0
_LONGEST_LINE = 1 << 20
_SHOWN = 40
_STRANGER = "who listens there is none of us:"


class TalkError(Exception):
    """Why two nodes cannot talk.

    Args:
        kind: refused, dropped, route, name, stranger, closed or other.
        text: the same in words.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Talk:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(ANSWER_SECONDS)
        self._lines = connection.makefile("r", encoding="utf-8", errors="replace", newline="\n")

    def say(self, text: str) -> None:
        """Send a line."""
        self._connection.sendall(f"{text}\n".encode())

    def hear(self, seconds: float | None = None) -> str:
        """Wait for a line, for as long as usual unless another time is given; an empty one stands for the end."""
        if seconds is not None:
            self._connection.settimeout(seconds)
        return self._lines.readline(_LONGEST_LINE).strip()

    @property
    def peer(self) -> str:
        """The address of the other end."""
        return str(self._connection.getpeername()[0]).removeprefix("::ffff:")

    def close(self) -> None:
        """End the connection."""
        self._lines.close()
        self._connection.close()


def greet(address: str, port: int, word: str, node: int) -> Talk:
    """Connect to a node, and have it prove that it belongs to the same look.

    Raises:
        TalkError: why that failed.
    """
    try:
        connection = socket.create_connection((address, port), ANSWER_SECONDS)
    except OSError as error:
        raise _why(error) from None
    if connection.getsockname() == connection.getpeername():  # TCP can connect a port of its own to itself.
        connection.close()
        raise _why(ConnectionRefusedError(errno.ECONNREFUSED, ""))
    talk, (mine, theirs) = Talk(connection), _halves(word)
    try:
        talk.say(f"{mine} {node}")
        heard = talk.hear()
    except TimeoutError:
        talk.close()
        raise TalkError("stranger", f"{_STRANGER} it says nothing for {ANSWER_SECONDS:g} s") from None
    except OSError:
        heard = ""
    if heard != theirs:
        talk.close()
        if not heard:
            raise TalkError("closed", "who listens there ends the connection without a word")
        raise TalkError("stranger", f"{_STRANGER} it says {heard[:_SHOWN]!r}")
    return talk


def receive(connection: socket.socket, word: str) -> tuple[Talk, int] | None:
    """Hear who connects, and prove who we are; return the talk and the other node, None for a stranger."""
    talk, (theirs, mine) = Talk(connection), _halves(word)
    try:
        said, _, node = talk.hear().partition(" ")
        if said == theirs and node.isdecimal():
            talk.say(mine)
            return talk, int(node)
    except OSError:
        pass  # It says nothing, or is gone: a stranger.
    talk.close()
    return None


def serve(listener: socket.socket, each: Callable[[socket.socket], None]) -> None:
    """Have a thread take connections, until :func:`stop`, each in a thread of its own."""

    def take() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=each, args=(connection,), daemon=True).start()

    threading.Thread(target=take, daemon=True).start()


def stop(listener: socket.socket) -> None:
    """Take no more connections: closing alone would not wake who waits for one."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _halves(word: str) -> tuple[str, str]:
    """Return what shows who connects, and what shows who listens."""
    return word[: len(word) // 2], word[len(word) // 2 :]


def _why(error: OSError) -> TalkError:
    if isinstance(error, socket.gaierror):
        return TalkError("name", f"the name cannot be resolved: {error.strerror}")
    if isinstance(error, ConnectionRefusedError):
        return TalkError("refused", "the connection is refused")
    if isinstance(error, TimeoutError):
        return TalkError("dropped", f"no answer within {ANSWER_SECONDS:g} s")
    kind = "route" if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH) else "other"
    return TalkError(kind, os.strerror(error.errno).lower() if error.errno else str(error))
