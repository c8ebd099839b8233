"""Amounts as people write them: ``48:00:00``, ``30min``, ``200GB``, ``2:4``.

Times follow sbatch (``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours``,
``days-hours:minutes``, ``days-hours:minutes:seconds``) and PBS walltime, and take suffixes besides.
Memory is in powers of 1024 whichever way it is spelled, as Slurm and PBS count.
"""

from __future__ import annotations

import re

_SUFFIX_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_MEMORY_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}

_WITH_SUFFIX = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d)", re.ASCII)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)i?b?", re.ASCII | re.IGNORECASE)
_NODES = re.compile(r"(\d+)(?::(\d+))?", re.ASCII)


def parse_duration(text: str) -> int:
    """Return the seconds in ``text``; a bare number means minutes, as in ``sbatch --time``.

    Raises:
        ValueError: with a sentence on what is accepted.
    """
    text = text.strip()
    if suffixed := _WITH_SUFFIX.fullmatch(text):
        seconds = round(float(suffixed[1]) * _SUFFIX_SECONDS[suffixed[2]])
    elif clock := _CLOCK.fullmatch(text):
        seconds = _clock_seconds(clock)
    else:
        raise ValueError(f"{text!r} is no duration; write 48:00:00, 2-12:00, 90 (minutes), 30min or 12h")
    if seconds <= 0:
        raise ValueError(f"{text!r} is no duration: it must be longer than 0")
    return seconds


def _clock_seconds(clock: re.Match[str]) -> int:
    days, first, second, third = (int(part) if part else None for part in clock.groups())
    if days is not None:
        hours, minutes, seconds = first, second, third
    elif third is not None:
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
    number, unit = float(match[1]), match[2].lower()
    is_bare = match[0].strip() == match[1]
    size = int(number * 1024 ** (2 if is_bare else _MEMORY_POWER[unit]))
    if size <= 0:
        raise ValueError(f"{text!r} is no amount of memory: it must be more than 0")
    return size


def format_memory(size: int) -> str:
    """Write bytes in the largest unit that divides them: ``200G``."""
    for unit in ("", "K", "M", "G", "T"):
        if size % 1024 or unit == "T":
            return f"{size}{unit}"
        size //= 1024
    raise AssertionError


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
    if not 1 <= least <= most:
        raise ValueError(f"{text!r} is no number of nodes: it must be at least 1, and MIN:MAX in that order")
    return least, most
