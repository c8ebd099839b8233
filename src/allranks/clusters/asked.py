"""When a scheduler is asked about a run: at growing intervals, and when the run's files say that something happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from allranks import contract
from allranks.clusters.queued_files import newest
from allranks.runs.status import State, Status

#: A scheduler is asked at growing intervals: thousands of people ask the same server.
_FIRST_SECONDS, _MOST_SECONDS = 0.5, contract.scaled_wait(15.0)


class Asked:
    """What a scheduler was asked about a run, and when it is to be asked again."""

    status = Status(State.UNKNOWN)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: object = None
        self.pauses = pauses()
        self._next = 0.0

    def is_due(self, now: float) -> bool:
        """Tell whether it is time, or the run's files have changed."""
        attempt = newest(self._folder)
        files = attempt, (attempt / contract.JOB).exists(), (attempt / contract.EXIT).exists()
        if files != self._files:
            self._files, self.pauses = files, pauses()
            return True
        return now >= self._next

    def rest(self, now: float) -> None:
        """Let some time pass before the next question, more each time."""
        self._next = now + next(self.pauses)


def pauses() -> Iterator[float]:
    """Yield the seconds between two questions to a scheduler."""
    pause = _FIRST_SECONDS
    while True:
        yield pause
        pause = min(_MOST_SECONDS, pause * 1.5)
