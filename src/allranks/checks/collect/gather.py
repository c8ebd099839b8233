"""The program of a probe: collects facts on a node, all at the same time, and gives up on those that hang.

A directory of a file server that does not answer, say, would block everything else for ever.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from allranks import contract
from allranks.checks.collect.request import ProbeRequest, report_lines

#: Each fact by the module with the function of its name, which takes the request and returns what JSON can hold.
FACTS = {
    **dict.fromkeys(("host", "cpus", "memory", "shm", "limits", "interfaces", "disks", "variables"), "machine"),
    **dict.fromkeys(("names", "interface", "infiniband"), "network"),
    **dict.fromkeys(("port", "reach", "mesh"), "meeting"),
    **dict.fromkeys(("torch", "script", "files", "shared"), "script"),
    **{name: name for name in ("gpus", "site", "leftovers")},
}
#: Facts that wait for other nodes, or for programs, and end by themselves, get more seconds than the request says.
_SECONDS = {"reach": 50.0, "mesh": 50.0, "site": 15.0}
#: Facts about several nodes: a single node does not even import their modules, and waits for no resolver.
_BETWEEN = {"names", "interface", "port", "reach", "mesh"}


def gather(request: ProbeRequest) -> dict[str, Any]:
    """Return ``facts`` by name, and the ``errors`` of those that could not be collected."""
    facts: dict[str, Any] = {}
    errors: dict[str, str] = {}

    def collect(name: str) -> None:
        try:
            facts[name] = _fact(name, request)
        except Exception as error:  # noqa: BLE001 - one fact less, with the reason
            errors[name] = f"{type(error).__name__}: {error}"

    threads = {name: threading.Thread(target=collect, args=(name,), daemon=True) for name in request.wanted}
    for thread in threads.values():
        thread.start()
    started = time.monotonic()
    for name, thread in threads.items():
        seconds = _SECONDS.get(name.partition("/")[0], request.seconds)
        thread.join(max(0.0, started + seconds - time.monotonic()))
        if thread.is_alive():
            errors[name] = f"no answer within {seconds:g} s"
    return {"facts": {name: fact for name, fact in facts.copy().items() if name not in errors}, "errors": dict(errors)}


def _fact(name: str, request: ProbeRequest) -> Any:
    """Collect one fact; what follows a slash in its name is an argument: which one of its kind it is."""
    if request.nnodes == 1 and name in _BETWEEN:
        return None
    kind, *which = name.split("/", 1)
    return getattr(import_module(f"allranks.checks.collect.{FACTS[kind]}"), kind)(request, *which)


def main(raw: Mapping[str, Any], node: int) -> None:
    """Collect what a request asks for, report it on stdout, and exit, whatever still waits."""
    request = replace(ProbeRequest.from_json(raw), node=node)
    host, port = os.environ.get(contract.RDZV_HOST, ""), os.environ.get(contract.RDZV_PORT, "0")
    if host and not request.master_addr and request.nnodes > 1:  # The supervisor of a batch job sets these.
        request = replace(request, master_addr=host, master_port=int(port))
    for line in report_lines(node, gather(request)):
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
    os._exit(0)  # A thread may still wait for a file server.
