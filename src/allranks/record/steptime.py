"""Where the time of a rank's steps went: a file for each rank, which holds windows of some steps each.

The file is 8 bytes that name its form, and behind them a record for each window, in order of time. It is written in
place: a reader that comes in between skips what is not in order.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

#: What a step's time goes into, in the order of the file: waiting for a batch; forward and backward pass; waiting for
#: other ranks, and exchanging gradients with them; the optimizer; checkpoints; and all else.
PHASES: Final = ("data", "compute", "exchange", "optimizer", "checkpoint", "other")
#: A file has so many windows at most. When it is full, all but the newest are joined to fewer that are longer.
MOST, NEWEST = 512, 64
HEAD: Final = b"steps 2\n"
_RECORD = struct.Struct(f"<dqIH{len(PHASES)}f4If")
RECORD_BYTES: Final = _RECORD.size


class Place(NamedTuple):
    """How far a training is in its epochs, in batches of a rank; all 0 if that is not known.

    Attributes:
        epoch: the current one, from 1.
        epochs: how many the whole training has; 0 if the script has not given that.
        left: batches that follow in the current epoch.
        length: batches of a whole epoch.
    """

    epoch: int = 0
    epochs: int = 0
    left: int = 0
    length: int = 0


class Window(NamedTuple):
    """Steps of one rank that followed each other.

    Attributes:
        start: of the first step, in seconds since 1970.
        first: how many steps the training had made before.
        steps: how many there are.
        restart: how often the ranks had been restarted in this attempt.
        spent: seconds in each of :data:`PHASES`; together they are all the time of these steps.
        place: where the training was after them.
        queued: seconds of them for which the rank's main thread could run and got no CPU.
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
        """How long the steps took together."""
        return sum(self.spent)

    def to_bytes(self) -> bytes:
        """Return the record of the file."""
        return _RECORD.pack(self.start, self.first, self.steps, self.restart, *self.spent, *self.place, self.queued)

    def joined(self, following: Window) -> Window:
        """Return one window for this and the one after it."""
        spent = tuple(one + other for one, other in zip(self.spent, following.spent, strict=True))
        queued = self.queued + following.queued
        return self._replace(steps=self.steps + following.steps, spent=spent, place=following.place, queued=queued)


def read_windows(path: Path, newest: int | None = None) -> list[Window]:
    """Return the windows of a file, the oldest first, or so many of the newest; none if it is of another version."""
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
        end = len(data) - len(data) % RECORD_BYTES  # The last record may be on its way.
        last = -math.inf
        for record in _RECORD.iter_unpack(data[:end]):
            start, _, steps, restart = record[:4]
            if steps and start > last:
                found.append(Window(start, record[1], steps, restart, record[4:-5], Place(*record[-5:-1]), record[-1]))
                last = start
    return found
