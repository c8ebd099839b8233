"""The agent's heartbeat and its own log. On a full disk they are lost, and the run continues."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path

from allranks import contract
from allranks.record.logindex import LogIndexWriter

_HEARTBEAT_SECONDS = contract.scaled_wait(5.0)


class Heartbeat:
    """A file that changes every few seconds while the agent is alive; also keeps the log index up to date."""

    def __init__(self, path: Path, index: LogIndexWriter, mode: int) -> None:
        self._index = index
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
        self._next = 0.0

    def tick(self) -> None:
        """Record which logs have grown and, when it is time, the heartbeat."""
        self._index.tick()
        if (now := time.time()) >= self._next:
            self._next = now + _HEARTBEAT_SECONDS
            try:
                # Fixed width, in place: a reader sees this beat or the last one, and the disk need have no space.
                os.pwrite(self._descriptor, f"{now:017.6f}\n".encode(), 0)
            except OSError:
                pass  # The disk is full or gone; the next beat may work.


def complain(text: str | None = None) -> None:
    """Write ``text``, or the traceback of the exception being handled, to the agent's own log, if that works."""
    text = traceback.format_exc() if text is None else text + "\n"
    try:
        os.write(2, text.encode(errors="backslashreplace"))
    except OSError:
        pass  # The disk is full: there is no other place for it.
