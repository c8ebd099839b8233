"""Agents connect to the coordinator, prove the run's key and are told so: ours / the same messages without a key.

64 nodes, all on this machine, in one process: the time of a node is that of both of its ends.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable

from harness import in_turn, report

from allranks.agent.nodes.channel import Channel

NODES = 64
KEY = bytes(32)
HELLO = {"attempt": 0, "node": 1, "host": "gpu01", "ranks": 8, "torch": "2.13.0"}


class Plain:
    """What a channel does without a key: lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, kind: str, **fields: object) -> None:
        self._connection.sendall(json.dumps({"kind": kind, "sent": time.time(), **fields}).encode() + b"\n")

    def receive(self) -> list[object]:
        return [json.loads(line) for line in self._connection.recv(65536).splitlines()]


def meet(coordinator: Callable[[socket.socket], object], node: Callable[[socket.socket], object]) -> float:
    """Return the seconds for each node, from its connection to the welcome that it has read."""
    began = time.perf_counter()
    with socket.create_server(("127.0.0.1", 0), backlog=NODES) as listener:
        sockets = [socket.create_connection(listener.getsockname()) for _ in range(NODES)]
        ends = [listener.accept()[0] for _ in range(NODES)]
        nodes, hubs = [node(one) for one in sockets], [coordinator(one) for one in ends]
        for one in nodes:
            one.send("hello", **HELLO)
        welcomed = 0
        while welcomed < NODES:
            for ready in select.select([*nodes, *hubs], [], [])[0]:
                for message in ready.receive():
                    if message["kind"] == "hello":
                        ready.send("welcome", host="gpu00")
                    else:
                        welcomed += 1
        took = time.perf_counter() - began
        for one in (*sockets, *ends):
            one.close()
    return took / NODES


def main() -> None:
    def channel(*, is_coordinator: bool) -> Callable[[socket.socket], Channel]:
        return lambda connection: Channel(connection, KEY, is_coordinator=is_coordinator, patient=True)

    ours, theirs = in_turn(
        9,
        lambda: 1000 * meet(channel(is_coordinator=True), channel(is_coordinator=False)),
        lambda: 1000 * meet(Plain, Plain),
    )
    report("a node proves the key", ours, theirs, "ms", f"5 ms more; now {ours - theirs:.2f}")


if __name__ == "__main__":
    main()
