"""Compressed host lists: ``gpu[01-03,07],login1``.

Source: the "Hostlist" notation in the manual of scontrol(1), which may be missing on compute nodes; pdsh has it too.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator

#: Most hosts in a list: a short text such as ``n[0-99999999]`` must not exhaust memory.
MOST_HOSTS = 65_536
#: Most characters in a name. DNS allows 253.
_LONGEST_NAME = 255
_LONGEST_SHOWN = 60

_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)")
#: Up to 18 digits, so that ``len`` of a ``range`` of such numbers cannot overflow.
_RANGE = re.compile(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?")
_TOKEN = re.compile(r"([^\[\],\s]+)|\[([0-9,\-\s]+)\]")


def expand(text: str) -> Iterator[str]:
    """Yield the hosts in the order of the text.

    Numbers keep leading zeros: ``n[08-10]`` is n08, n09, n10. Several brackets in a name are nested loops, the last one
    innermost.

    Raises:
        ValueError: the text is invalid (the message names the part), or has more than :data:`MOST_HOSTS` hosts,
           which are counted before the first one is generated.
    """
    names = [[*_choices(name)] for name in split(text)]
    if sum(math.prod(count for count, _ in choices) for choices in names) > MOST_HOSTS:
        raise ValueError(f"{_shown(text)} is more than {MOST_HOSTS:,} hosts, the most that a list can have")
    for choices in names:
        for host in map("".join, itertools.product(*(texts for _, texts in choices))):
            if len(host) > _LONGEST_NAME:
                what = f"{_shown(host)} is a name of {len(host):,} characters"
                raise ValueError(f"{what}, and {_LONGEST_NAME} is the most")
            yield host


def _choices(name: str) -> Iterator[tuple[int, Iterable[str]]]:
    """Yield the number of choices for each part of a name, and the choices: a text or numbers."""
    position = 0
    while position < len(name):
        token = _TOKEN.match(name, position)
        if token is None:
            raise ValueError(f"{_shown(name)} has a bracket that is not closed or holds no numbers")
        if token[1]:
            yield 1, [token[1]]
        else:
            ranges = [_range(part) for part in token[2].split(",")]
            count = sum(len(numbers) for numbers, _ in ranges)
            yield count, (f"{number:0{digits}d}" for numbers, digits in ranges for number in numbers)
        position = token.end()


def _range(text: str) -> tuple[range, int]:
    """Parse ``01-03`` or ``07``: the numbers, and their least number of digits."""
    found = _RANGE.fullmatch(text)
    first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
    if int(last) < int(first):
        raise ValueError(f"invalid range of numbers: {_shown(text)}")
    return range(int(first), int(last) + 1), len(first)


def fold(hosts: Iterable[str]) -> str:
    """Compress a list of hosts; names that differ only in their last number are merged.

    The inverse of :func:`expand` except for order: names are sorted by number, and each host appears once.
    """
    kinds: dict[tuple[str, int, str], set[int]] = {}
    for host in hosts:
        found = _NUMBERED.fullmatch(host)
        name, number, rest = found.groups() if found else (host, "", "")
        kinds.setdefault((name, len(number), rest), set()).add(int(number or -1))
    written = []
    for (name, digits, rest), numbers in kinds.items():
        starts = sorted(number for number in numbers if number - 1 not in numbers)
        ends = sorted(number for number in numbers if number + 1 not in numbers)
        pairs = [(f"{start:0{digits}d}", f"{end:0{digits}d}") for start, end in zip(starts, ends, strict=True)]
        inner = ",".join(start if start == end else f"{start}-{end}" for start, end in pairs)
        if len(numbers) > 1:
            inner = f"[{inner}]"
        written.append(f"{name}{inner}{rest}" if digits else name)
    return ",".join(written)


def split(text: str) -> list[str]:
    """Split at the commas that are outside of brackets; raise a ValueError if a name is empty."""
    names, start = [], 0
    for found in re.finditer(r"\[[^\[\]]*\]|,", text):
        if found[0] == ",":
            names.append(text[start : found.start()].strip())
            start = found.end()
    names.append(text[start:].strip())
    if not all(names):
        raise ValueError(f"an empty name in {_shown(text)}")
    return names


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…")
