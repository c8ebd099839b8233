"""Events and checkpoints of a run as JSON lines. Each file has one writer, so a shared file system needs no locks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from allranks import contract


class Event(NamedTuple):
    """An event: time (seconds since 1970), host, rank, kind and fields."""

    time: float
    host: str
    kind: str
    rank: int | None
    fields: dict[str, Any]


class EventWriter:
    """Appends events to a file, of which it must be the only writer.

    A full or missing disk is not an error: pending events are written before the next one.
    """

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        import socket  # Commands that only read events start sooner without it.

        self._unwritten = b""
        self._host = socket.gethostname()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event. A full disk is not an error."""
        record = {"time": round(time.time(), 6), "host": self._host, "kind": kind, **fields}
        self._unwritten += json.dumps(record).encode() + b"\n"
        try:
            # A write may stop mid-line; the next one continues there.
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
        except OSError:
            pass


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines, none if it is missing; skip incomplete lines."""
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


class SaveRecord(NamedTuple):
    """A checkpoint with the path on rank 0, or the start of an attempt, without a path.

    ``leaving``: whether all ranks exited then, to be resumed from it. ``time``: seconds since 1970, if recorded.
    """

    attempt: int
    step: int
    path: str | None
    leaving: bool
    time: float | None = None


def read_saves(run: Path) -> list[SaveRecord]:
    """Return the checkpoints of a run, oldest first; empty if its script does not use ``ctx.checkpoints``."""
    found = []
    with suppress(OSError):
        for record in read_lines(run / contract.CHECKPOINTS_FILE):
            with suppress(ValueError, KeyError, TypeError):
                path, when = record["path"], record.get("time")
                number, step, leaving = int(record["attempt"]), int(record["step"]), bool(record["leaving"])
                found.append(SaveRecord(number, step, path and str(path), leaving, when and float(when)))
    return found
