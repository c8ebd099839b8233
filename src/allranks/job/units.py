"""Amounts as people write them: ``48:00:00``, ``30min``, ``200GB``, ``2:4``.

Times follow sbatch (``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours``,
``days-hours:minutes``, ``days-hours:minutes:seconds``) and PBS walltime, and take suffixes besides.
Memory is in powers of 1024 whichever way it is spelled, as Slurm and PBS count, in whole kilobytes: that is
the smallest amount that every scheduler can be told.
"""

from __future__ import annotations

import math
import re

_SUFFIX_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_MEMORY_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}

#: Beyond these an amount is a slip of the pen, and numbers would no longer be exact.
_LONGEST = 100 * 365 * 86400
_LARGEST = 1024**6
_MOST_NODES = 1_000_000

# Digits are counted so that a page of them neither overflows nor takes time.
_WITH_SUFFIX = re.compile(r"(\d{1,16}(?:\.\d{1,16})?)\s*(s|sec|m|min|h|d)", re.ASCII | re.IGNORECASE)
_CLOCK = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", re.ASCII)
_MEMORY = re.compile(r"(\d{1,16}(?:\.\d{1,16})?)\s*((?:[kmgtp]i?)?)(b?)", re.ASCII | re.IGNORECASE)
_NODES = re.compile(r"(\d{1,9})(?::(\d{1,9}))?", re.ASCII)


def parse_duration(text: str) -> int:
    """Return the seconds in ``text``; a bare number means minutes, as in ``sbatch --time``.

    Raises:
        ValueError: with a sentence on what is accepted.
    """
    text = text.strip()
    if suffixed := _WITH_SUFFIX.fullmatch(text):
        seconds = round(float(suffixed[1]) * _SUFFIX_SECONDS[suffixed[2].lower()])
    elif clock := _CLOCK.fullmatch(text):
        seconds = _clock_seconds(clock)
    else:
        raise ValueError(f"{text!r} is no duration; write 48:00:00, 2-12:00, 90 (minutes), 30min or 12h")
    if seconds <= 0:
        raise ValueError(f"{text!r} is no duration: it must be longer than 0")
    if seconds > _LONGEST:
        raise ValueError(f"{text!r} is no duration: it is longer than 100 years")
    return seconds


def _clock_seconds(clock: re.Match[str]) -> int:
    days, first, second, third = (int(part) if part else None for part in clock.groups())
    if days is not None or third is not None:
        hours, minutes, seconds = first, second, third
    else:
        hours, minutes, seconds = 0, first, second
    return (((days or 0) * 24 + (hours or 0)) * 60 + (minutes or 0)) * 60 + (seconds or 0)


def format_duration(seconds: int) -> str:
    """Write seconds as hours, minutes and seconds, which every scheduler reads: ``48:00:00``."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02d}:{minute:02d}:{second:02d}"


def parse_memory(text: str) -> int:
    """Return the bytes in ``text``; a bare number means megabytes, as in ``sbatch --mem``.

    Raises:
        ValueError: with a sentence on what is accepted.
    """
    match = _MEMORY.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is no amount of memory; write 200GB, 512M or 1.5T")
    number, unit, byte = match.groups()
    is_bare = not unit and not byte
    power: int = 2 if is_bare else _MEMORY_POWER[unit[:1].lower()]
    size = float(number) * float(1024**power)
    if size <= 0:
        raise ValueError(f"{text!r} is no amount of memory: it must be more than 0")
    if size > _LARGEST:
        raise ValueError(f"{text!r} is no amount of memory: it is more than any machine has")
    return math.ceil(size / 1024) * 1024


def format_memory(size: int) -> str:
    """Write bytes in the largest unit that divides them, rounded up to whole kilobytes: ``200G``.

    There is always a unit: a bare number would be read as megabytes.
    """
    amount = max(1, math.ceil(size / 1024))
    for unit in ("K", "M", "G"):
        if amount % 1024:
            return f"{amount}{unit}"
        amount //= 1024
    return f"{amount}T"


def format_size(amount: float) -> str:
    """Write bytes with three digits and the unit that fits: 512 B, 1.21 GB."""
    for unit in ("B", "KB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the least and the most nodes in ``text``: ``4`` or, for elastic jobs, ``2:4``.

    Raises:
        ValueError: with a sentence on what is accepted.
    """
    match = _NODES.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is no number of nodes; write 4, or 2:4 for at least 2 and at most 4")
    least = int(match[1])
    most = int(match[2] or least)
    if not 1 <= least <= most <= _MOST_NODES:
        raise ValueError(f"{text!r} is no number of nodes: it must be at least 1, and MIN:MAX in that order")
    return least, most


def format_count(number: int, noun: str) -> str:
    """Write a number of things: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"
