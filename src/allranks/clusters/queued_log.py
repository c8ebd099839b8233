"""Logs of a scheduler's jobs: finding them, and what of them tells a cause."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allranks import contract

#: More than any log of ours that is read to its end.
_TAIL_BYTES = 1 << 20


def lines_of(log: Path, start: int = 0) -> list[str]:
    """Return the last lines of a log, from a byte of it on; none if it cannot be read."""
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(max(start, log.stat().st_size - _TAIL_BYTES))
        return stream.read().decode(errors="replace").splitlines()
    return []


def telling(log: Path, noise: re.Pattern[str], start: int = 0) -> list[str]:
    """Return the last lines of a log that may tell a cause, each once, at most two.

    Args:
        log: the log.
        noise: what begins a line that says nothing of the cause.
        start: the byte at which what counts of the log begins.
    """
    lines = [line for line in lines_of(log, start) if line.strip()]
    found = dict.fromkeys(line for line in lines if not (line[0].isspace() or noise.match(line)))
    return [line.removeprefix("allranks: ") for line in [*found][-2:]]


def plan_of(folder: Path) -> dict[str, Any]:
    """Return a run's plan; nothing where it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / contract.PLAN_FILE).read_text(encoding="utf-8")))
    return {}


def with_text(pattern: str) -> Iterator[tuple[float, Path]]:
    """Yield the files with text in them that an absolute pattern fits, with the time of their last change."""
    for path in Path("/").glob(pattern.lstrip("/")):
        with contextlib.suppress(OSError):
            found = path.stat()
            if found.st_size:
                yield found.st_mtime, path
