"""The last thing that a log says: mostly the cause of an end."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_TAIL_BYTES = 65536
#: What torch puts before each line of a traceback, and how lines of its own log begin: no cause stands there.
_TORCH_RANK = re.compile(r"^\[rank\d+\]: ?")
_TORCH_LOG = re.compile(r"\[(?:rank\d+\]:\[)?[IW]\d{4} ")
#: The lines after the first of an error of ours, and what stands before its first one.
_OF_AN_ERROR = re.compile(r"  (?:why|fix|see): ")
_OURS = re.compile(r"^(?:allranks\.errors\.\w+: |allranks: (?:error: )?)")


def last_line(path: Path) -> str | None:
    """Return the last line with text in it of a file's end, if it has any."""
    return last_of(tail(path))


def tail(path: Path) -> list[str]:
    """Return the lines of a file's end; none if it is not there."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def last_of(lines: Iterable[str]) -> str | None:
    """Return the last line that says something, if there is one; of an error of ours, its first line.

    Such an error ends with lines of why and fix, which alone do not say what happened.
    """
    plain = [_TORCH_RANK.sub("", line).rstrip() for line in lines]
    said = [line for line in plain if line.strip() and not _TORCH_LOG.match(line.strip())]
    while len(said) > 1 and _OF_AN_ERROR.match(said[-1]):
        said.pop()
    return _OURS.sub("", said[-1].strip())[:500] if said else None
