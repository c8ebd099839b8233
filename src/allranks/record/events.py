"""Events and checkpoints of a run: one line of JSON each, one writer per file: a shared filesystem needs no locks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks import contract


@dataclass(frozen=True)
class Event:
    """Something that happened: when (seconds since 1970), on which host, to which rank, and what."""

    time: float
    host: str
    kind: str
    rank: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)


class EventWriter:
    """Appends events to a file. The only writer of that file.

    A disk that is full or gone does not stop its process: what could not be written is written before the next event.
    """

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        import socket  # Commands that only read events start sooner without it.

        self._unwritten = b""
        self._host = socket.gethostname()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event. Raises nothing for a full disk."""
        record = {"time": round(time.time(), 6), "host": self._host, "kind": kind, **fields}
        self._unwritten += json.dumps(record).encode() + b"\n"
        try:
            # A write may stop in the middle of a line; the next one continues there.
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
        except OSError:
            pass


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines, none if it is missing; a line that was cut off is skipped."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for line in data.splitlines():
        with suppress(ValueError):
            raw = json.loads(line)
            if isinstance(raw, dict):
                yield raw


def read_events(path: Path) -> Iterator[Event]:
    """Yield the complete events of a file, none if it is missing."""
    for raw in read_lines(path):
        with suppress(KeyError):
            yield Event(raw.pop("time"), raw.pop("host"), raw.pop("kind"), raw.pop("rank", None), raw)


@dataclass(frozen=True)
class SaveRecord:
    """A checkpoint, as rank 0 names its path, or the start of an attempt, without one.

    ``leaving``: all ranks exited then, to be resumed from there. ``time``: in seconds since 1970, if it is recorded.
    """

    attempt: int
    step: int
    path: str | None
    leaving: bool
    time: float | None = None


def read_saves(run: Path) -> list[SaveRecord]:
    """Return the checkpoints of a run, oldest first; none if its script saves in its own way."""
    found = []
    with suppress(OSError):
        for record in read_lines(run / contract.CHECKPOINTS_FILE):
            with suppress(ValueError, KeyError, TypeError):
                path, when = record["path"], record.get("time")
                number, step, leaving = int(record["attempt"]), int(record["step"]), bool(record["leaving"])
                found.append(SaveRecord(number, step, path and str(path), leaving, when and float(when)))
    return found
