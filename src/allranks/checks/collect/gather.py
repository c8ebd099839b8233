"""The program of a probe: collects facts on a node, all at the same time, and gives up on those that hang.

A directory of a file server that does not answer, say, would block everything else for ever.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from allranks import contract

#: The facts of each module: its function of that name takes the request, and returns what JSON can hold.
_MODULES = {
    "machine": "host cpus memory shm limits interfaces infiniband disks variables leftovers",
    "network": "names interface port reach mesh",
    "script": "torch script files shared",
    "gpus": "gpus",
    "site": "site",
}
FACTS = {name: module for module, names in _MODULES.items() for name in names.split()}
#: Facts that wait for other nodes, or for programs, and end by themselves, get more seconds than the request says.
_SECONDS = {"reach": 50.0, "mesh": 50.0, "site": 15.0}
_MARK = "allranks-probe"
#: Short lines, in characters: what merges the output of many nodes may cut long ones, and mix those of two nodes.
_CHUNK = 600


class ProbeRequest(NamedTuple):
    """What a node is asked to collect, sent there as JSON."""

    wanted: tuple[str, ...]  # Names of facts, those of collect.gather.FACTS.
    nnodes: int = 1
    nproc_per_node: int = 1
    kind: str = ""  # What the ranks run: script, module or binary; empty: nothing that could be inspected.
    target: str = ""  # Its absolute path, or its name.
    folders: Mapping[str, str] = {}  # Absolute directories, by what they are for.
    files: tuple[str, ...] = ()  # Absolute paths of files that the job names in its arguments.
    variables: tuple[str, ...] = ()  # Names of variables that this site needs.
    executables: Mapping[str, str] = {}  # Checks of this site by name, in base64.
    shared: str = ""  # A file that all nodes must see, which holds the word; empty where they share none.
    word: str = ""  # A secret of this probe, by which its nodes recognise each other.
    master_addr: str = ""  # Where the nodes meet; empty for a single node.
    master_port: int = 0  # Likewise; 0: none is known.
    seconds: float = 10.0  # Time limit of a fact.
    node: int = 0


def report_lines(node: int, found: Mapping[str, Any]) -> Iterator[str]:
    """Encode what a node found, so that it arrives complete among whatever else its shell prints."""
    text = json.dumps(found)
    pieces = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
    for number, piece in enumerate(pieces):
        yield f"{_MARK} {node} {number} {len(pieces)} {piece}|"


def read_reports(output: str) -> dict[int, dict[str, Any]]:
    """Decode the reports in an output, by node; an incomplete one is left out."""
    pieces: dict[int, dict[int, str]] = {}
    counts: dict[int, int] = {}
    for line in output.splitlines():
        _, mark, rest = line.partition(f"{_MARK} ")
        fields = rest.split(" ", 3)
        if mark and len(fields) == 4 and fields[3].endswith("|") and all(map(str.isdecimal, fields[:3])):
            node, number, count = map(int, fields[:3])
            counts[node] = count
            pieces.setdefault(node, {})[number] = fields[3][:-1]
    complete = {node: parts for node, parts in pieces.items() if len(parts) == counts[node]}
    return {node: json.loads("".join(parts[number] for number in sorted(parts))) for node, parts in complete.items()}


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
    kind, *which = name.split("/", 1)
    if request.nnodes == 1 and FACTS[kind] == "network":
        return None  # They are about several nodes: a single one does not even import them, and waits for no resolver.
    return getattr(import_module(f"allranks.checks.collect.{FACTS[kind]}"), kind)(request, *which)


def main(raw: Mapping[str, Any], node: int) -> None:
    """Collect what a request asks for, report it on stdout, and exit, whatever still waits."""
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
    request = ProbeRequest(**{**given, "node": node})
    host, port = os.environ.get(contract.RDZV_HOST, ""), os.environ.get(contract.RDZV_PORT, "0")
    if host and not request.master_addr and request.nnodes > 1:  # The supervisor of a batch job sets these.
        request = request._replace(master_addr=host, master_port=int(port))
    for line in report_lines(node, gather(request)):
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
    os._exit(0)  # A thread may still wait for a file server.
