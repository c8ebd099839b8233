"""The short way to write many host names: ``gpu[01-03,07],login1``.

Source: the "Hostlist" notation in the manual of scontrol(1), which may be missing on compute nodes; pdsh has it too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)")
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


def fold(hosts: Iterable[str]) -> str:
    """Write hosts the short way; what differs but in its last number is put together.

    The inverse of :func:`expand` but for the order: names with a number come by number, and each host once.
    """
    kinds: dict[tuple[str, int, str], set[int]] = {}
    for host in hosts:
        found = _NUMBERED.fullmatch(host)
        name, number, rest = found.groups() if found else (host, "", "")
        kinds.setdefault((name, len(number), rest), set()).add(int(number or -1))
    return ",".join(_folded(*kind, sorted(numbers)) for kind, numbers in kinds.items())


def _folded(name: str, digits: int, rest: str, numbers: list[int]) -> str:
    if not digits:
        return name
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    pairs = [(f"{start:0{digits}d}", f"{end:0{digits}d}") for start, end in zip(starts, ends, strict=True)]
    ranges = [start if start == end else f"{start}-{end}" for start, end in pairs]
    inner = ",".join(ranges)
    return f"{name}{inner if len(numbers) == 1 else f'[{inner}]'}{rest}"


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
