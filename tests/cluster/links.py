"""Nodes whose links are as fast as a test says: what a search finds then does not depend on this machine's load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nodes import Network

#: What each node sends: far less than any machine can do, so that a busy one is hardly slower.
EVEN = "120mbit"
#: What a slow node sends: a search names what takes three times as long as others, and this takes twelve times.
SLOW = "10mbit"


@contextmanager
def shaped(network: Network, *slow: str) -> Iterator[None]:
    """Have all nodes send at one rate, and the slow ones at a lower one."""
    shaped = []
    try:
        for name, node in network.nodes.items():
            rate = SLOW if name in slow else EVEN
            node.run(f"tc qdisc add dev eth0 root tbf rate {rate} burst 64kb latency 200ms")
            shaped.append(node)
        yield
    finally:
        for node in shaped:
            node.run("tc qdisc delete dev eth0 root")
