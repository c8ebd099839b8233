"""What a node is asked to collect, and the lines by which it reports what it found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_MARK = "allranks-probe"
#: Short lines, in characters: what merges the output of many nodes may cut long ones, and mix those of two nodes.
_CHUNK = 600


@dataclass(frozen=True)
class ProbeRequest:
    """What a node is asked to collect, sent there as JSON."""

    wanted: tuple[str, ...]  # Names of facts, those of collect.gather.FACTS.
    nnodes: int = 1
    nproc_per_node: int = 1
    kind: str = ""  # What the ranks run: script, module or binary; empty: nothing that could be inspected.
    target: str = ""  # Its absolute path, or its name.
    folders: Mapping[str, str] = field(default_factory=dict)  # Absolute directories, by what they are for.
    files: tuple[str, ...] = ()  # Absolute paths of files that the job names in its arguments.
    variables: tuple[str, ...] = ()  # Names of variables that this site needs.
    executables: Mapping[str, str] = field(default_factory=dict)  # Checks of this site by name, in base64.
    shared: str = ""  # A file that all nodes must see, which holds the word; empty where they share none.
    word: str = ""  # A secret of this probe, by which its nodes recognise each other.
    master_addr: str = ""  # Where the nodes meet; empty for a single node.
    master_port: int = 0  # Likewise; 0: none is known.
    seconds: float = 10.0  # Time limit of a fact.
    node: int = 0

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ProbeRequest:
        """Read a request that was encoded as JSON."""
        known: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
        return cls(**known)


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
