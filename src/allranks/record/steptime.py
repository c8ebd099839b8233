"""Step times of a rank: one file per rank, with windows of several steps each.

The file is an 8-byte magic number, then one record per window, in order of time. It is written in place: a concurrent
reader skips records that are out of order.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

#: The phases of a step, in the order of the file: waiting for a batch; forward and backward pass; waiting for other
#: ranks and exchanging gradients; the optimizer; checkpoints; everything else.
PHASES: Final = ("data", "compute", "exchange", "optimizer", "checkpoint", "other")
#: Most windows in a file, and of these the newest. When it is full, all but the newest are joined to longer ones.
MOST, NEWEST = 512, 64
HEAD: Final = b"steps 2\n"
_RECORD = struct.Struct(f"<dqIH{len(PHASES)}f4If")
RECORD_BYTES: Final = _RECORD.size


class Place(NamedTuple):
    """Position in the epochs, in batches of a rank; all 0 if unknown.

    Attributes:
        epoch: number of the current epoch, from 1.
        epochs: epochs of the complete training; 0 if unknown.
        left: batches left in the current epoch.
        length: batches of an epoch.
    """

    epoch: int = 0
    epochs: int = 0
    left: int = 0
    length: int = 0


class Window(NamedTuple):
    """Consecutive steps of one rank.

    Attributes:
        start: start of the first step, in seconds since 1970.
        first: number of training steps before it.
        steps: number of steps.
        restart: number of restarts of the ranks before, in this attempt.
        spent: seconds in each of :data:`PHASES`; their sum is the total time.
        place: position of the training after the last step.
        queued: seconds in which the rank's main thread waited for a CPU.
    """

    start: float
    first: int
    steps: int
    restart: int
    spent: tuple[float, ...]
    place: Place = Place()
    queued: float = 0.0

    @property
    def seconds(self) -> float:
        """Total time of the steps."""
        return sum(self.spent)

    def to_bytes(self) -> bytes:
        """Return the record of the file."""
        return _RECORD.pack(self.start, self.first, self.steps, self.restart, *self.spent, *self.place, self.queued)

    def joined(self, following: Window) -> Window:
        """Return this window joined with the following one."""
        spent = tuple(one + other for one, other in zip(self.spent, following.spent, strict=True))
        queued = self.queued + following.queued
        return self._replace(steps=self.steps + following.steps, spent=spent, place=following.place, queued=queued)


def read_windows(path: Path, newest: int | None = None) -> list[Window]:
    """Return the windows of a file, or its ``newest`` ones, oldest first; empty if it is of another version."""
    try:
        with path.open("rb") as stream:
            is_ours = stream.read(len(HEAD)) == HEAD
            if newest is not None:
                count = (stream.seek(0, os.SEEK_END) - len(HEAD)) // RECORD_BYTES
                stream.seek(len(HEAD) + max(0, count - newest) * RECORD_BYTES)
            data = stream.read()
    except OSError:
        return []
    found = list[Window]()
    if is_ours:
        end = len(data) - len(data) % RECORD_BYTES  # The last record may be incomplete.
        last = -math.inf
        for record in _RECORD.iter_unpack(data[:end]):
            start, _, steps, restart = record[:4]
            if steps and start > last:
                found.append(Window(start, record[1], steps, restart, record[4:-5], Place(*record[-5:-1]), record[-1]))
                last = start
    return found
