"""Waiting for another rank without a collective operation, whose timeout would end the job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.25


def poll(look: Callable[[], T | None], seconds: float | None = None) -> T | None:
    """Call ``look`` with growing pauses until it gives something, and give that; None after so many seconds.

    Short looks with sleeps in between, since a wait inside the store would keep its connection from the other
    threads of this process.
    """
    end = None if seconds is None else time.monotonic() + seconds
    pause = _SHORTEST_PAUSE
    while (found := look()) is None:
        if end is not None and time.monotonic() >= end:
            return None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return found
