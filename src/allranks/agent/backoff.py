"""How long to wait before a restart."""

from __future__ import annotations

import time

#: A generation that lived longer than this is not part of a row of failures: the delay starts over.
_HEALTHY_SECONDS = 60.0
_LONGEST_DELAY = 60.0


class Backoff:
    """Delays of restarts: none for the first, then twice as long for each quick failure in a row.

    Args:
        first: the delay of the second restart in a row, in seconds.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self._quick_failures = 0

    def delay(self, started: float) -> float:
        """Return how many seconds to wait after the failure of the generation started at ``started`` (monotonic)."""
        quick = time.monotonic() - started < _HEALTHY_SECONDS
        self._quick_failures = self._quick_failures + 1 if quick else 1
        if self._quick_failures < 2:
            return 0.0
        return float(min(_LONGEST_DELAY, self._first * 2.0 ** min(self._quick_failures - 2, 32)))
