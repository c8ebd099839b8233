"""Messages between the agents of two nodes: JSON, one a line, over a connection that never makes anybody wait."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from allranks import contract

#: A node that answers nothing for so long is lost; the kernel asks it every second, however busy its agent is. Of a
#: process that ends, or a machine that goes down in order, one hears at once. At least 2 s: one answer may be late.
_SILENCE_SECONDS = max(2, contract.whole_wait(5))
#: The same, where the job cannot go on without any of its nodes: an outage of the network may pass.
_PATIENT_SECONDS = contract.whole_wait(30)
#: No message of ours is longer.
_LONGEST = 1 << 20

Message = dict[str, Any]


class Channel:
    """One end of a connection to another agent.

    Args:
        connection: it is this channel's from now on.
        patient: whether to bear a longer silence.

    Attributes:
        lost: why no more can come, once that is so.
    """

    def __init__(self, connection: socket.socket, *, patient: bool) -> None:
        self.lost: str | None = None
        self._connection = connection
        self._unread = b""
        self._unsent = b""
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            _watch(connection, _PATIENT_SECONDS if patient else _SILENCE_SECONDS)

    @property
    def here(self) -> str:
        """Our address as the other side knows it; empty for a connection within this machine."""
        name = self._connection.getsockname()
        return name[0].removeprefix("::ffff:") if isinstance(name, tuple) else ""

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self._connection.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; what the connection does not take now goes with :meth:`flush`."""
        self._unsent += json.dumps({"kind": kind, "sent": time.time(), **fields}).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what waits."""
        try:
            while self._unsent and not self.lost:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""  # What it has said before is still to be read; then reading tells why it is lost.

    def receive(self) -> list[Message]:
        """Return the messages that have come."""
        self._read()
        *lines, self._unread = self._unread.split(b"\n")
        messages: list[Message] = []
        for line in lines:
            message = _parse(line)
            if message is None:
                self.lost = "what it says is no message of an agent"
                break
            messages.append(message)
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.lost = self.lost or "closed"
        self._connection.close()

    def _read(self) -> None:
        try:
            while not self.lost:
                data = self._connection.recv(65536)
                self._unread += data
                if not data:
                    self.lost = "its agent is gone"
                elif len(self._unread) > _LONGEST:
                    self.lost = "what it says is no message of an agent"
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.lost = "its agent is gone"
        except OSError as error:
            self.lost = f"the connection broke: {os.strerror(error.errno or 0)}"


def _watch(connection: socket.socket, silence: int) -> None:
    """Have the kernel find out when the other machine is gone without a word (man 7 tcp)."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, silence)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence * 1000)


def _parse(line: bytes) -> Message | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(message, dict) and isinstance(message.get("sent"), float)
    return message if is_ours and isinstance(message.get("kind"), str) else None
