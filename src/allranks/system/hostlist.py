"""The short way to write many host names: ``gpu[01-03,07],login1``.

Source: the "Hostlist" notation in the manual of scontrol(1), which may be missing on compute nodes; pdsh has it too.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator

#: No list is of more hosts. ``n[0-99999999]`` is written in a few letters, and takes all memory.
MOST_HOSTS = 65_536
#: Characters. A name in DNS has at most 253.
_LONGEST_NAME = 255
_LONGEST_SHOWN = 60

_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)")
#: Up to 18 digits: a ``range`` of any such numbers has a ``len``.
_RANGE = re.compile(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?")
_TOKEN = re.compile(r"([^\[\],\s]+)|\[([0-9,\-\s]+)\]")


def expand(text: str) -> Iterator[str]:
    """Yield the hosts one by one, in the order written.

    Numbers keep their leading zeros: ``n[08-10]`` is n08, n09, n10. Several brackets in a name run like
    nested loops, the last one fastest.

    Raises:
        ValueError: the text is not written so; the message names the part. Or it is more than :data:`MOST_HOSTS`
            hosts, which is counted before the first one is made.
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
    """Yield what each part of a name may be, a text or numbers, and how many choices that are."""
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
    """Read ``01-03``, or ``07``: the numbers, and how many digits they have at least."""
    found = _RANGE.fullmatch(text)
    first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
    if int(last) < int(first):
        raise ValueError(f"invalid range of numbers: {_shown(text)}")
    return range(int(first), int(last) + 1), len(first)


def fold(hosts: Iterable[str]) -> str:
    """Write hosts the short way; what differs but in its last number is put together.

    The inverse of :func:`expand` but for the order: names with a number come by number, and each host once.
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
