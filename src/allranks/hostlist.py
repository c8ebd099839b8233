"""The short way to write many host names: ``gpu[01-03,07],login1``.

Source: the "Hostlist" notation in the manual of scontrol(1), which may be missing on compute nodes; pdsh has it too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_TOKEN = re.compile(r"([^\[\],\s]+)|\[([0-9,\-\s]+)\]")


def expand(text: str) -> Iterator[str]:
    """Yield the hosts one by one, in the order written.

    Numbers keep their leading zeros: ``n[08-10]`` is n08, n09, n10. Several brackets in a name run like
    nested loops, the last one fastest.

    Raises:
        ValueError: the text is not written so; the message names the part.
    """
    for name in split(text):
        yield from map("".join, itertools.product(*_pieces(name)))


def split(text: str) -> list[str]:
    """Split at the commas that are outside of brackets.

    Raises:
        ValueError: there is nothing before or after one.
    """
    names = [name.strip() for name in re.split(r",(?![^\[\]]*\])", text)]
    if not all(names):
        raise ValueError(f"an empty name in {text!r}")
    return names


def _pieces(name: str) -> list[list[str]]:
    """Take a name apart into its constant and its counting pieces."""
    pieces, position = [], 0
    while position < len(name):
        token = _TOKEN.match(name, position)
        if token is None:
            raise ValueError(f"{name!r} has a bracket that is not closed or holds no numbers")
        pieces.append([token[1]] if token[1] else _numbers(token[2]))
        position = token.end()
    return pieces


def _numbers(text: str) -> list[str]:
    """Expand ``01-03,07`` to 01, 02, 03, 07."""
    numbers: list[str] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first):
            raise ValueError(f"{part!r} is no range of numbers")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return numbers
