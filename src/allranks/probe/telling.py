"""How a node tells what it has found, so that it arrives whole beside whatever else its shell prints.

Short lines: what brings the output of many nodes together may cut long ones, and mix those of different nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_MARK = "allranks-probe"
_CHUNK = 600


def lines(node: int, found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that tell what a node has found."""
    text = json.dumps(found)
    pieces = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
    for number, piece in enumerate(pieces):
        yield f"{_MARK} {node} {number} {len(pieces)} {piece}|"


def read(output: str) -> dict[int, dict[str, Any]]:
    """Return what the nodes tell in an output, by node; one that has not told all of it is left out."""
    pieces: dict[int, dict[int, str]] = {}
    counts: dict[int, int] = {}
    for line in output.splitlines():
        _, mark, rest = line.partition(f"{_MARK} ")
        fields = rest.split(" ", 3)
        if mark and len(fields) == 4 and fields[3].endswith("|") and all(map(str.isdecimal, fields[:3])):
            node, number, counts_of_node = map(int, fields[:3])
            pieces.setdefault(node, {})[number] = fields[3][:-1]
            counts[node] = counts_of_node
    whole = {node: told for node, told in pieces.items() if len(told) == counts[node]}
    return {node: json.loads("".join(told[number] for number in sorted(told))) for node, told in whole.items()}
