"""What runs on a node: looks, tells, and ends, whatever is still waiting for an answer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from allranks import contract
from allranks.probe import telling
from allranks.probe.gather import gather
from allranks.probe.order import Order


def main(raw: Mapping[str, Any], node: int) -> None:
    """Find out what an order asks for, and tell it on stdout.

    Args:
        raw: the order, as JSON decodes it.
        node: which node this is.
    """
    order = _met(replace(Order.from_json(raw), node=node))
    for line in telling.lines(node, gather(order)):
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
    os._exit(0)  # A thread may still wait for a file server.


def _met(order: Order) -> Order:
    """Return the order with where the nodes meet, where the script of a scheduler's job has found that out on them."""
    host, port = os.environ.get(contract.RDZV_HOST, ""), os.environ.get(contract.RDZV_PORT, "0")
    if order.master_addr or order.nnodes == 1 or not host:
        return order
    return replace(order, master_addr=host, master_port=int(port))
