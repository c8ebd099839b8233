"""When a checkpoint is due, and the steps at which the ranks agree on a save or a stop."""

from __future__ import annotations

import re
import time

from allranks.errors import RankError
from allranks.runtime.call_errors import is_whole

#: Seconds between two agreements of the ranks: the longest delay of a stop request.
AGREE_SECONDS = 0.5
_NAMES = {1: ("s", "sec", "second"), 60: ("m", "min", "minute"), 3600: ("h", "hour"), 86400: ("d", "day")}
_UNITS = {name: seconds for seconds, names in _NAMES.items() for name in names}
_SPAN = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([a-z]+?)s?", re.ASCII | re.IGNORECASE)
#: Most steps between two agreements, in case steps suddenly become slow.
_MOST = 256


def check_keep(keep: object) -> None:
    """Raise a RankError unless ``keep`` is at least 1."""
    if not is_whole(keep, 1):
        raise RankError(f"keep={keep!r}: at least one checkpoint has to stay", fix="keep=3")


def parse_every(every: int | str | None) -> tuple[int | None, float | None]:
    """Return the steps, or the seconds, of ``500``, ``"500 steps"``, ``"10min"``, ``"1.5 h"`` or ``"30 s"``."""
    if every is None:
        return None, None
    if is_whole(every, 1):
        return every, None
    if isinstance(every, str) and (match := _SPAN.fullmatch(every.strip())):
        number, unit = float(match[1]), match[2].lower()
        if unit == "step" and number >= 1 and number == int(number):
            return int(number), None
        if unit in _UNITS and number > 0:
            return None, number * _UNITS[unit]
    raise RankError(
        f"every={every!r} is neither a number of steps nor a span of time",
        fix='write every=500, every="500 steps", every="10min" or every="1h"',
    )


def parse_time(name: str, value: str) -> float:
    """Return the seconds of an argument such as ``"1min"`` or ``"90 s"``."""
    match = _SPAN.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise RankError(f"invalid span of time: {name}={value!r}", fix=f'write {name}="90 s", {name}="2min"')
    return float(match[1]) * _UNITS[match[2].lower()]


class SaveSchedule:
    """The steps at which ranks agree on a save or a stop: all know the next one, about ``seconds`` away.

    The step time is that of the slowest rank, which the agreement exchanges. The distance at most doubles from one
    agreement to the next, in case that time was an outlier.

    Attributes:
        next: the step of the next agreement.
        saved_step: the step of the last save, or at which the training started.
    """

    def __init__(self, every: int | str | None = None) -> None:
        self._every_steps, self._every_seconds = parse_every(every)
        self.start(0)

    def start(self, step: int) -> None:
        """Start at ``step``, which counts as saved."""
        self.next = self._last = step
        self._distance = 1
        self._since = time.perf_counter()
        self.note_save(step)

    def note_save(self, step: int) -> None:
        """Count the time and steps to the next save from now on."""
        self.saved_step, self._saved_at = step, time.monotonic()

    def is_time(self) -> bool:
        """Return True if the seconds of ``every`` have passed on this rank since the last save."""
        return self._every_seconds is not None and time.monotonic() - self._saved_at >= self._every_seconds

    def is_due(self, step: int) -> bool:
        """Return True if a multiple of the steps of ``every`` was passed since the last save."""
        every = self._every_steps
        return every is not None and step // every > self.saved_step // every

    def microseconds_per_step(self, step: int) -> int:
        """Return the mean time of this rank's steps since the last agreement."""
        now = time.perf_counter()
        mean = (now - self._since) / max(1, step - self._last)
        self._since, self._last = now, step
        return int(mean * 1e6)

    def plan(self, step: int, microseconds: int, seconds: float) -> None:
        """Set the step of the next agreement, from the step time in microseconds that all ranks agreed on."""
        fitting = int(seconds * 1e6 / max(1, microseconds))
        self._distance = max(1, min(fitting, 2 * self._distance, _MOST))
        self.next = step + self._distance
        if (every := self._every_steps) and not self.is_due(step):
            self.next = min(self.next, (self.saved_step // every + 1) * every)
