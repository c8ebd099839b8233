"""Amounts as people write them: ``48:00:00``, ``30min``, ``200GB``, ``2:4``.

Times follow sbatch (``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours``,
``days-hours:minutes``, ``days-hours:minutes:seconds``) and PBS walltime, and take suffixes besides.
Memory is in powers of 1024 whichever way it is spelled, as Slurm and PBS count, in whole kilobytes, the smallest
unit of all schedulers. An invalid amount is a ValueError with a sentence on what is accepted. What schedulers
print is read more leniently: :func:`reading`, :func:`time_of`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone

_SUFFIX_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_MEMORY_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}

#: Beyond these an amount is a slip of the pen, and numbers would no longer be exact.
_LONGEST = 100 * 365 * 86400
_LARGEST = 1024**6
_MOST_NODES = 1_000_000

# Digits are counted so that a page of them neither overflows nor takes time. Compiled when a text is parsed: commands
# that only format start sooner.
_WITH_SUFFIX = r"(\d{1,16}(?:\.\d{1,16})?)\s*(s|sec|m|min|h|d)"
_CLOCK = r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?"
_MEMORY = r"(\d{1,16}(?:\.\d{1,16})?)\s*((?:[kmgtp]i?)?)(b?)"
_RATE = r"(\d{1,16}(?:\.\d{1,16})?)\s*([kKMGT]?)B/s"  # Gb/s and 100G would be bits.
_NUMBER = r"(\d{1,16}(?:\.\d{1,16})?)\s*([kmbt]?)"
_NUMBER_POWER = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NODES = r"(\d{1,9})(?::(\d{1,9}))?"


def parse_duration(text: str) -> int:
    """Return the seconds in ``text``; a bare number means minutes, as in ``sbatch --time``."""
    text = text.strip()
    if suffixed := re.fullmatch(_WITH_SUFFIX, text, re.ASCII | re.IGNORECASE):
        seconds = round(float(suffixed[1]) * _SUFFIX_SECONDS[suffixed[2].lower()])
    elif clock := re.fullmatch(_CLOCK, text, re.ASCII):
        days, hours, minutes, second = (int(part or 0) for part in clock.groups())
        if clock[1] is None and clock[4] is None:
            hours, minutes, second = 0, hours, minutes  # Minutes come first, if there are no more than two parts.
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + second
    else:
        raise ValueError(f"invalid duration: {text!r}; write 48:00:00, 2-12:00, 90 (minutes), 30min or 12h")
    if not 0 < seconds <= _LONGEST:
        rule = "it is longer than 100 years" if seconds else "it must be longer than 0"
        raise ValueError(f"invalid duration: {text!r}: {rule}; write 48:00:00, 30min or 12h")
    return seconds


def format_duration(seconds: int) -> str:
    """Write seconds as hours, minutes and seconds, which every scheduler reads: ``48:00:00``."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02d}:{minute:02d}:{second:02d}"


def format_seconds(amount: float) -> str:
    """Write a span of time the way people say it: 8.2 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if amount < 60:
        return f"{amount:.1f} s"
    minutes, second = divmod(round(amount), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hours} h {minute} min" if hours else f"{minutes} min {second} s"


def format_span(seconds: float) -> str:
    """Write a short time with three digits: ``0.25 us``, ``12.5 ms``, ``1.25 s``."""
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 or not seconds else f"{seconds * 1e6:.3g} us"


def format_hours(hours: float) -> str:
    """Write hours that are summed over ranks: ``4,352 h``; of less than one, minutes and seconds."""
    return format_seconds(hours * 3600) if hours < 1 else f"{format_number(hours)} h"


def format_number(value: float) -> str:
    """Write a number with four digits, and large ones without an exponent: ``0.01283``, ``35,750``."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e10 else f"{value:.4g}"


def parse_memory(text: str, base: float = 1024.0) -> int:
    """Return the bytes in ``text``; a bare number means megabytes, as in ``sbatch --mem``.

    ``base`` is that of units without an i: 1024 for schedulers, 1000 for what :func:`format_size` writes.
    """
    match = re.fullmatch(_MEMORY, text.strip(), re.ASCII | re.IGNORECASE)
    if not match:
        raise ValueError(f"invalid amount of memory: {text!r}; write 200GB, 512M or 1.5T")
    number, unit, byte = match.groups()
    power = _MEMORY_POWER[unit[:1].lower()] if unit or byte else 2
    size = float(number) * (1024.0 if unit[1:] else base) ** power
    if not 0 < size <= _LARGEST:
        rule = "it is more than any machine has" if size else "it must be more than 0"
        raise ValueError(f"invalid amount of memory: {text!r}: {rule}; write 200GB, 512M or 1.5T")
    return math.ceil(size / 1024) * 1024


def parse_rate(text: str) -> float:
    """Return the bytes per second in ``text``, such as ``2GB/s``, in powers of 1000 as rates are."""
    match = re.fullmatch(_RATE, text.strip(), re.ASCII)
    rate = float(match[1]) * 1000.0 ** _MEMORY_POWER[match[2].lower()] if match else 0.0
    if not 0 < rate <= _LARGEST:
        raise ValueError(f"invalid rate: {text!r}; write 2GB/s or 500MB/s")
    return rate


def parse_number(text: str) -> int:
    """Return a number of things, such as parameters: ``350M``, ``1.3B`` or ``1300000000``."""
    match = re.fullmatch(_NUMBER, text.strip(), re.ASCII | re.IGNORECASE)
    number = round(float(match[1]) * _NUMBER_POWER[match[2].lower()]) if match else 0
    if not 0 < number <= _LARGEST:
        raise ValueError(f"invalid number: {text!r}; write 350M, 1.3B or 1300000000")
    return number


def format_memory(size: int) -> str:
    """Write bytes in the largest unit that divides them, rounded up to whole kilobytes, never bare: ``200G``."""
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
    """Return the least and the most nodes in ``text``: ``4`` or, for elastic jobs, ``2:4``."""
    match = re.fullmatch(_NODES, text.strip(), re.ASCII)
    if not match:
        raise ValueError(f"invalid number of nodes: {text!r}; write 4, or 2:4 for at least 2 and at most 4")
    least = int(match[1])
    most = int(match[2] or least)
    if not 1 <= least <= most <= _MOST_NODES:
        rule = "it must be at least 1, and MIN:MAX in that order"
        raise ValueError(f"invalid number of nodes: {text!r}: {rule}; write 4, or 2:4 for at least 2 and at most 4")
    return least, most


def format_count(number: int, noun: str) -> str:
    """Write a number of things: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def reading(text: str, parse: Callable[[str], int] = int) -> int:
    """Return a number, a time or a size; 0 if the text has none, or says that there is no limit."""
    with suppress(ValueError):
        return parse(text)
    return 0


def time_of(text: str) -> float | None:
    """Return a time in seconds since 1970; None if the text, of a number, of ISO 8601 or of ctime in UTC, has none."""
    with suppress(ValueError):
        return float(text)
    for parse in (datetime.fromisoformat, lambda ctime: datetime.strptime(ctime, "%a %b %d %H:%M:%S %Y")):
        with suppress(ValueError):
            return parse(text).replace(tzinfo=timezone.utc).timestamp()
    return None
