"""When to save, and when ranks look whether they agree on it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from allranks.errors import RankError

_UNITS = {
    "s": 1,
    "sec": 1,
    "second": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "d": 86400,
    "day": 86400,
}
_SPAN = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([a-z]+?)s?", re.ASCII | re.IGNORECASE)
#: Most steps between two looks: a loop that becomes slow all at once must not keep a request waiting for long.
_MOST = 256


@dataclass(frozen=True)
class Every:
    """How often to save.

    Attributes:
        steps: after so many steps; None if it goes by time.
        seconds: after so many seconds; None if it goes by steps. Neither: only when asked to.
    """

    steps: int | None = None
    seconds: float | None = None


def parse_every(every: int | str | None) -> Every:
    """Read ``every`` of ``ctx.checkpoints``: ``500``, ``"500 steps"``, ``"10min"``, ``"1.5 h"``, ``"30 s"``.

    Raises:
        RankError: it is none of these.
    """
    if every is None:
        return Every()
    if isinstance(every, int) and not isinstance(every, bool):
        if every > 0:
            return Every(steps=every)
    elif isinstance(every, str) and (match := _SPAN.fullmatch(every.strip())):
        number, unit = float(match[1]), match[2].lower()
        if unit == "step" and number >= 1 and number == int(number):
            return Every(steps=int(number))
        if unit in _UNITS and number > 0:
            return Every(seconds=number * _UNITS[unit])
    raise RankError(
        f"every={every!r} is neither a number of steps nor a span of time",
        fix='write every=500, every="500 steps", every="10min" or every="1h"',
    )


def parse_time(name: str, value: str) -> float:
    """Read a span of time, as in ``every``, and return its seconds.

    Args:
        name: of the argument.
        value: ``"1min"``, ``"90 s"``.

    Raises:
        RankError: it is none.
    """
    match = _SPAN.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise RankError(f"{name}={value!r} is no span of time", fix=f'write {name}="90 s", {name}="2min"')
    return float(match[1]) * _UNITS[match[2].lower()]


class Looks:
    """At which steps ranks look at each other: all know the next one, and it is about ``seconds`` away.

    The time of a step is taken from the slowest rank, and travels with the look itself. It is not trusted at once:
    the distance at most doubles from one look to the next.

    Args:
        step: where the training stands.
    """

    def __init__(self, step: int) -> None:
        self.next = step
        self._last = step
        self._distance = 1
        self._since = time.perf_counter()

    def microseconds_per_step(self, step: int) -> int:
        """Give the mean time of this rank's steps since the last look."""
        now = time.perf_counter()
        mean = (now - self._since) / max(1, step - self._last)
        self._since, self._last = now, step
        return int(mean * 1e6)

    def plan(self, step: int, microseconds: int, seconds: float) -> None:
        """Set the next look, from what all ranks agreed a step takes."""
        fitting = int(seconds * 1e6 / max(1, microseconds))
        self._distance = max(1, min(fitting, 2 * self._distance, _MOST))
        self.next = step + self._distance
