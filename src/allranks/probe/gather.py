"""Finds out the facts of a node, all at the same time, and gives up on those that do not come.

A folder of a file server that does not answer, say, would keep everything else waiting for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from allranks.probe.order import Order

#: Each fact with the function that finds it out: it takes the order, and returns what JSON can hold.
FACTS = {
    "host": "machine:host",
    "cpus": "machine:cpus",
    "memory": "machine:memory",
    "shm": "machine:shm",
    "limits": "machine:limits",
    "disks": "machine:disks",
}


def gather(order: Order) -> dict[str, Any]:
    """Return ``facts`` by name, and the ``errors`` of those that could not be found out."""
    facts: dict[str, Any] = {}
    errors: dict[str, str] = {}

    def find(name: str) -> None:
        try:
            facts[name] = _function(FACTS[name])(order)
        except Exception as error:  # noqa: BLE001 - one fact less: who asked for it is told why
            errors[name] = f"{type(error).__name__}: {error}"

    threads = {name: threading.Thread(target=find, args=(name,), daemon=True) for name in order.wanted}
    for thread in threads.values():
        thread.start()
    until = time.monotonic() + order.seconds
    for thread in threads.values():
        thread.join(max(0.0, until - time.monotonic()))
    for name in threads.keys() - facts.keys() - errors.keys():
        errors[name] = f"no answer within {order.seconds:g} s"
    return {"facts": dict(facts), "errors": errors}


def _function(reference: str) -> Callable[[Order], Any]:
    module, _, name = reference.partition(":")
    function: Callable[[Order], Any] = getattr(import_module(f"allranks.probe.{module}"), name)
    return function
