"""Whether each node can connect to each other one, at ports that nobody has chosen: collectives do so."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from allranks.probe.talk import TalkError, greet, receive, serve, stop
from allranks.routes import listen_everywhere

#: All must be there at the same time, and more are not reached over SSH at once.
MOST_NODES = 64


class Door:
    """Where other nodes connect to this one, until it is closed.

    Args:
        word: tells the processes that look from others.
    """

    def __init__(self, word: str) -> None:
        self._word, self._listener = word, listen_everywhere(0)
        self.port: int = self._listener.getsockname()[1]
        serve(self._listener, self._receive)

    def _receive(self, connection: socket.socket) -> None:
        if met := receive(connection, self._word):
            met[0].close()

    def close(self) -> None:
        """Take no more connections."""
        stop(self._listener)

    @staticmethod
    def told(doors: Mapping[str, tuple[str, int]]) -> str:
        """Return address and port of each node's door as a line; no address: that of who tells."""
        return json.dumps(doors)

    @staticmethod
    def read(line: str, teller: str) -> dict[int, tuple[str, int]]:
        """Read such a line.

        Raises:
            ValueError: it is none.
        """
        return {int(node): (address or teller, port) for node, (address, port) in json.loads(line).items()}

    def try_all(self, doors: Mapping[int, tuple[str, int]], node: int) -> dict[str, Any]:
        """Connect to the doors of others; return how many were tried, and which could not be reached and why."""
        from concurrent.futures import ThreadPoolExecutor

        def why_not(door: tuple[str, int]) -> str | None:
            try:
                greet(*door, self._word, node).close()
            except TalkError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(min(MOST_NODES, len(doors)) or 1) as pool:
            found = dict(zip(map(str, doors), pool.map(why_not, doors.values()), strict=True))
        return {"tried": len(doors), "unreached": {other: why for other, why in found.items() if why}}
