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
    "interfaces": "machine:interfaces",
    "disks": "machine:disks",
    "names": "network:names",
    "interface": "network:interface",
    "infiniband": "network:infiniband",
    "port": "port:port",
    "reach": "reach:reach",
    "mesh": "reach:mesh",
    "gpus": "gpus:gpus",
    "torch": "software:torch",
    "script": "software:script",
    "files": "software:files",
    "shared": "software:shared",
    "variables": "variables:variables",
    "site": "site:answer",
    "leftovers": "leftovers:leftovers",
}
#: Those that wait for other nodes, or for programs, and end by themselves, get longer than the order says.
_SECONDS = {"reach": 50.0, "mesh": 50.0, "site": 15.0}


#: What there is only where nodes meet: for one node, its modules are not even imported, and no resolver is waited for.
_BETWEEN = {"names", "interface", "port", "reach", "mesh"}


def gather(order: Order) -> dict[str, Any]:
    """Return ``facts`` by name, and the ``errors`` of those that could not be found out."""
    facts: dict[str, Any] = {}
    errors: dict[str, str] = {}

    def find(name: str) -> None:
        try:
            facts[name] = _fact(name, order)
        except Exception as error:  # noqa: BLE001 - one fact less: who asked for it is told why
            errors[name] = f"{type(error).__name__}: {error}"

    threads = {name: threading.Thread(target=find, args=(name,), daemon=True) for name in order.wanted}
    for thread in threads.values():
        thread.start()
    began = time.monotonic()
    for name, thread in threads.items():
        thread.join(max(0.0, began + _seconds(name, order) - time.monotonic()))
    for name in threads.keys() - facts.keys() - errors.keys():
        errors[name] = f"no answer within {_seconds(name, order):g} s"
    return {"facts": dict(facts), "errors": errors}


def _fact(name: str, order: Order) -> Any:
    """Find out one fact; what stands behind a slash in its name is handed on: which one of its kind it is."""
    if order.nnodes == 1 and name in _BETWEEN:
        return None
    kind, _, which = name.partition("/")
    function = _function(FACTS[kind])
    return function(order, which) if which else function(order)


def _seconds(name: str, order: Order) -> float:
    return _SECONDS.get(name.partition("/")[0], order.seconds)


def _function(reference: str) -> Callable[..., Any]:
    module, _, name = reference.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"allranks.probe.{module}"), name)
    return function
