"""The tracker protocol, the information about a run, and the default tracker: metrics as lines of JSON."""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from allranks import contract
from allranks.errors import RunFolderError
from allranks.record.files import write_atomically
from allranks.runtime import log

Value = float | int
#: End of a run's id: date, time, and a number if needed.
_STAMP = re.compile(r"-\d{4}-\d{4}(-\d+)?$")
#: Most bytes to keep while the disk is full.
_MOST_UNWRITTEN = 1 << 20
#: Least seconds between two writes: a write takes longer than the logging of several quick steps.
_SECONDS = 1.0


class Tracker(Protocol):
    """What an object in ``allranks.init(trackers=[...])`` implements, to write metrics to another place.

    allranks calls it from one background thread on rank 0. An exception ends the tracker, not the training. Two more
    methods are called if they exist: ``config(values)`` with hyperparameters, and ``resume(step)`` when the training
    continues after that step.
    """

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Write the values of a step."""

    def close(self) -> None:
        """Write pending values, and close."""


@dataclass(frozen=True)
class RunInfo:
    """The tracked run, and the place of its files.

    Attributes:
        name: name of the job, for projects and experiments.
        id: id of the run; None without ``allranks run``.
        folder: directory of the run; None likewise: files then go to the working directory.
    """

    name: str
    id: str | None = None
    folder: Path | None = None

    @classmethod
    def here(cls) -> RunInfo:
        """Read the environment of this process."""
        run, folder = os.environ.get(contract.RUN_ID), os.environ.get(contract.RUN_DIR)
        name = _STAMP.sub("", run) if run else Path(sys.argv[0]).stem or "python"
        return cls(name, run, Path(folder) if folder else None)


class JsonLines:
    """Appends one line per record to a file, at most one write per second.

    Records in between are written with the next one, and by :meth:`flush`, :meth:`close` and the end of the process. A
    killed process loses the records of at most a second.

    A line is ``{"step": 50, "time": 1731000000.5, "loss": 0.25}``; a number that is not finite is null. A file
    of an earlier start is renamed, unless the training continues from one of its steps (:meth:`resume`). A full or
    missing disk is reported once, and records are written once there is space again. With ``announce`` it prints the
    file's path once.
    """

    def __init__(self, path: Path, *, announce: bool = False) -> None:
        self._path = path
        self._announce = announce
        self._descriptor: int | None = None
        self._waiting: list[tuple[int, dict[str, Value], float]] = []
        #: Time of the last record that was written immediately.
        self._written = -math.inf
        self._unwritten = b""
        self._reported = False
        self._continues = False

    def write(self, step: int, values: dict[str, Value], when: float) -> None:
        """Append a record with its time, in seconds since 1970; ``values`` is read later and must not be changed."""
        self._waiting.append((step, values, when))
        # The clock may have been set back.
        if not 0 <= when - self._written < _SECONDS:
            self._written = when
            self.flush()

    def flush(self) -> None:
        """Write pending records."""
        waiting, self._waiting = self._waiting, []
        self._unwritten += b"".join(_line(*record) for record in waiting)
        if not self._unwritten:
            return
        try:
            descriptor = self._open()
            # A write may stop mid-line; the next one continues there.
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(descriptor, self._unwritten) :]
            self._reported = False
        except OSError as error:
            self._report(error.strerror or str(error))
            self._unwritten = self._unwritten[-_MOST_UNWRITTEN:]

    def resume(self, step: int) -> None:
        """Drop the records after ``step``, which the training writes again, and an incomplete last line."""
        self._continues = True
        self.close()
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            kept = [line for line in lines if _is_kept(line, step)]
            if kept != lines:
                write_atomically(self._path, "".join(kept), self._path.stat().st_mode & 0o777)
        except FileNotFoundError:
            return
        except OSError as error:
            self._report(error.strerror or str(error))
        except RunFolderError as error:
            self._report(error.why or error.what)

    def close(self) -> None:
        """Write pending records and close the file; a later record opens it again."""
        self.flush()
        if self._descriptor is not None:
            atexit.unregister(self.close)
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            if not self._continues:
                self._move_aside()
            self._continues = True
            if self._announce:
                log(f"metrics go to {self._path}")
            self._announce = False
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
            # For scripts that exit without closing the context.
            atexit.register(self.close)
        return self._descriptor

    def _move_aside(self) -> None:
        """Rename a file of an earlier start to ``metrics.1.jsonl``."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            return
        number = 1
        while (aside := self._path.with_suffix(f".{number}{self._path.suffix}")).exists():
            number += 1
        self._path.rename(aside)
        log(f"{self._path} was there from an earlier start; it is now {aside.name}")

    def _report(self, why: str) -> None:
        if not self._reported:
            log(f"warning: cannot write {self._path}: {why}; the training continues")
        self._reported = True


def _line(step: int, values: dict[str, Value], when: float) -> bytes:
    record: dict[str, Value | None] = {"step": step, "time": round(when, 3)}
    record.update({name: value if math.isfinite(value) else None for name, value in values.items()})
    return json.dumps(record).encode() + b"\n"


def _is_kept(line: str, step: int) -> bool:
    try:
        return bool(line.endswith("\n") and json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False
