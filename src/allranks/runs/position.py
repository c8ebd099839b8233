"""How far a training is in its epochs, and how long it still takes, as rank 0 has recorded it."""

from __future__ import annotations

from typing import NamedTuple

from allranks.record.steptime import Place
from allranks.runs.hangs import span
from allranks.runs.record import Run
from allranks.runs.steptime import of_start, read


class Position(NamedTuple):
    """Where a training is.

    Attributes:
        step: optimizer steps that are done.
        epoch: the current one, from 1.
        epochs: how many the script has given to ``loader.epochs()``; None if it has not.
        percent: how much of the current epoch is done.
        seconds_left: until the end of the last epoch, at the mean speed since the ranks started; None if unknown.
    """

    step: int
    epoch: int
    epochs: int | None
    percent: int
    seconds_left: float | None

    def __str__(self) -> str:
        """Write it as ``epoch 2 of 8, 45 %, 12 min left``."""
        of = f" of {self.epochs}" if self.epochs else ""
        left = "" if self.seconds_left is None else f", {span(self.seconds_left)} left"
        return f"epoch {self.epoch}{of}, {self.percent} %{left}"


def position(run: Run, now: float) -> Position | None:
    """Return where the training of a running run is; None without ``ctx.loader`` and ``ctx.optimizer``."""
    ranks = of_start(read(run.attempt_folder, rank=0))
    windows = [one for one in ranks[0].windows if one.place.length] if ranks else []
    if not windows:
        return None
    first, last = windows[0], windows[-1]
    place, seconds = last.place, now - first.start - first.seconds
    batches, seconds_left = _done(place) - _done(first.place), None
    if place.epochs and batches > 0:
        ahead = place.left + (place.epochs - place.epoch) * place.length
        # What has passed since the last window is evaluation, a checkpoint or a pause, as it may come again.
        seconds_left = max(0.0, ahead * seconds / batches)
    percent = 100 * (place.length - place.left) // place.length
    return Position(last.first + last.steps, place.epoch, place.epochs or None, percent, seconds_left)


def _done(place: Place) -> int:
    return place.epoch * place.length - place.left
