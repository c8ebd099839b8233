"""Records where the time of this rank's steps goes, with a few clock reads per step.

The parts of the runtime report which phase begins: waiting for a batch, forward pass, exchange of gradients, and so on.
The time until the next report counts for that phase. About two seconds of sums form one window of the rank's file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from allranks import contract
from allranks.record.steptime import HEAD, MOST, NEWEST, PHASES, RECORD_BYTES, Place, Window, read_windows
from allranks.system.processes import queued_seconds

DATA, COMPUTE, EXCHANGE, OPTIMIZER, CHECKPOINT, OTHER = range(len(PHASES))
_WINDOW_SECONDS = contract.scaled_wait(2.0)
_FEW = MOST * 3 // 4
_LONGEST_SECONDS = 1e6


class StepClock:
    """Sums up the time of this rank's steps by phase; it is written once :meth:`connect` was called."""

    __slots__ = ("_due", "_file", "_offset", "_queued", "_restart", "_since", "_spent", "_start", "_steps", "phase")

    def __init__(self) -> None:
        #: The current phase.
        self.phase = OTHER
        self._since = self._start = perf_counter()
        self._spent = [0.0] * len(PHASES)
        self._steps = -1  # The first step is not recorded: it compiles, allocates and imports.
        self._due = self._offset = self._queued = 0.0
        self._restart = 0
        self._file: _WindowFile | None = None

    def enter(self, phase: int) -> int:
        """Enter a phase; return the previous one."""
        now = perf_counter()
        before = self.phase
        self._spent[before] += now - self._since
        self._since = now
        self.phase = phase
        return before

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """Count the time of a block for a phase."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def count(self, step: int, place: Callable[[], Place] = Place) -> None:
        """Count a step, which ended at the last call of :meth:`enter`; ``place`` is called once per window."""
        self._steps += 1
        if self._since >= self._due:
            self._close_window(step, place())

    def connect(self, restart: int) -> None:
        """Write to a file beside the step counter's, if the agent has named that."""
        if path := os.environ.get(contract.STEP_FILE):
            try:
                self._file = _WindowFile(Path(path).with_suffix(contract.TIMES_SUFFIX))
            except OSError:
                return  # It is only a record.
            self._restart, self._offset = restart, time.time() - perf_counter()

    def close(self, step: int) -> None:
        """Write the last window, and close the file."""
        if self._steps > 0:
            self._close_window(step, Place())
        if self._file is not None:
            self._file.close()
            self._file = None

    def _close_window(self, step: int, place: Place) -> None:
        now = queued_seconds() if self._file else 0.0
        queued, self._queued = now - self._queued, now
        if self._steps > 0 and self._file is not None:
            spent, start = tuple(self._spent), self._start + self._offset
            self._file.add(Window(start, step - self._steps, self._steps, self._restart, spent, place, queued))
        self._spent = [0.0] * len(PHASES)
        self._steps, self._start, self._due = 0, self._since, self._since + _WINDOW_SECONDS


class _WindowFile:
    """The file of this rank, which has no other writer. A full disk is not an error.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._windows = read_windows(path)  # From before a restart.
        mode = 0o600 | (path.parent.stat().st_mode & 0o040)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
        self._seconds = _WINDOW_SECONDS
        self._write_all()

    def add(self, window: Window) -> None:
        self._windows.append(window)
        if len(self._windows) <= MOST:
            self._write(window.to_bytes(), len(HEAD) + (len(self._windows) - 1) * RECORD_BYTES)
            return
        self._windows = joined(self._windows, self._seconds)
        while len(self._windows) > _FEW and self._seconds < _LONGEST_SECONDS:
            self._seconds *= 2
            self._windows = joined(self._windows, self._seconds)
        self._windows = self._windows[-_FEW:]  # After many restarts, whose windows are not joined.
        self._write_all()

    def close(self) -> None:
        os.close(self._descriptor)

    def _write_all(self) -> None:
        data = HEAD + b"".join(map(Window.to_bytes, self._windows))
        self._write(data, 0)
        try:
            os.ftruncate(self._descriptor, len(data))
        except OSError:
            pass  # The rest of the old text is out of order, and readers skip it.

    def _write(self, data: bytes, offset: int) -> None:
        try:
            os.pwrite(self._descriptor, data, offset)
        except OSError:
            pass  # The disk is full or gone: readers skip the gap.


def joined(windows: list[Window], seconds: float) -> list[Window]:
    """Join neighbouring windows up to a length of ``seconds``; the newest stay unchanged."""
    found = windows[:1]
    for window in windows[1:-NEWEST]:
        fits = found[-1].restart == window.restart and found[-1].first + found[-1].steps == window.first
        if fits and found[-1].seconds + window.seconds <= seconds:
            found[-1] = found[-1].joined(window)
        else:
            found.append(window)
    return found + windows[-NEWEST:]
