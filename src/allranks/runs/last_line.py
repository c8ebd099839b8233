"""The last thing that a log says: mostly the cause of an end."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_TAIL_BYTES = 65536
#: What torch puts before each line of a traceback, and how lines of its own log begin: no cause stands there.
_TORCH_RANK = re.compile(r"^\[rank\d+\]: ?")
_TORCH_LOG = re.compile(r"\[(?:rank\d+\]:\[)?[IW]\d{4} ")


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
    """Return the last line that says something, if there is one."""
    said = [text for line in lines if (text := _TORCH_RANK.sub("", line).strip()) and not _TORCH_LOG.match(text)]
    return said[-1].removeprefix("allranks: ")[:500] if said else None
