"""Reads the step times of an attempt, and the position of its training, as its ranks recorded them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import add, lt, sub, truediv
from pathlib import Path
from typing import NamedTuple

from allranks import contract
from allranks.record.steptime import Place, Window, read_windows
from allranks.runs.hangs import span
from allranks.runs.record import Run


class RankTimes(NamedTuple):
    """The windows of one rank, oldest first, and the number of its last node."""

    rank: int
    node: int
    windows: list[Window]


def read(attempt: Path, newest: int | None = None, rank: int | None = None) -> list[RankTimes]:
    """Return the step times of an attempt's ranks, in order: the ``newest`` windows of each, or all.

    The ``NEWEST`` windows take about two seconds each, older ones are longer. Ranks without ``ctx.optimizer``, or that
    have just started, are missing. With ``rank`` only that one is read.
    """
    found: dict[int, RankTimes] = {}
    for path in sorted(attempt.glob(f"node-*/rank-{'*' if rank is None else rank}{contract.TIMES_SUFFIX}")):
        try:
            number, node = int(path.stem.removeprefix("rank-")), int(path.parent.name.removeprefix("node-"))
        except ValueError:
            continue
        windows = read_windows(path, newest)
        if windows and number in found:  # The rank was restarted on another node.
            here = node if windows[-1].start > found[number].windows[-1].start else found[number].node
            windows = sorted([*found[number].windows, *windows])
            found[number] = RankTimes(number, here, windows)
        elif windows:
            found[number] = RankTimes(number, node, windows)
    return sorted(found.values())


def of_start(ranks: Sequence[RankTimes], restart: int | None = None) -> list[RankTimes]:
    """Return the windows since the last start of the ranks, or of generation ``restart``."""
    if restart is None:
        restart = max((each.windows[-1].restart for each in ranks), default=0)
    kept = [[one for one in each.windows if one.restart == restart] for each in ranks]
    return [each._replace(windows=_counted_on(windows)) for each, windows in zip(ranks, kept, strict=True) if windows]


def _counted_on(windows: list[Window]) -> list[Window]:
    """Return the windows since the step number last went back, as in a second training."""
    _, firsts, steps, *_ = zip(*windows, strict=True)
    begins_again = [True, *map(lt, firsts[1:], map(add, firsts, steps))]
    return windows[len(windows) - 1 - begins_again[::-1].index(True) :]


def per_step(windows: Sequence[Window], edges: Sequence[int]) -> list[tuple[float, ...]]:
    """Return the seconds per step in each phase, between consecutive step numbers in ``edges``.

    The windows must be of one start and cover all of these steps.
    """
    _, firsts, steps, _, spent, *_ = zip(*windows, strict=True)
    totals = cumulated([*zip(*spent, strict=True)], [*zip(firsts, map(add, firsts, steps), strict=True)], edges)
    widths = [high - low for low, high in pairwise(edges)]
    return [*zip(*(map(truediv, differences(total), widths) for total in totals), strict=True)]


def cumulated(
    amounts: Sequence[Sequence[float]], spans: Sequence[tuple[float, float]], points: Iterable[float]
) -> list[list[float]]:
    """Return the cumulated amounts, given per window, at each point.

    ``spans`` are start and end of the windows, on the axis of the points.
    """
    starts, places = [start for start, _ in spans], list[tuple[int, float]]()
    for point in points:
        at = max(0, bisect_right(starts, point) - 1)
        start, end = spans[at]
        places.append((at, min(1.0, max(0.0, (point - start) / max(end - start, 1e-9)))))
    found = []
    for amount in amounts:
        before = [*accumulate(amount, initial=0.0)]
        found.append([before[at] + part * amount[at] for at, part in places])
    return found


def differences(values: Sequence[float]) -> Iterator[float]:
    """Yield the difference of each value to the previous one."""
    return map(sub, values[1:], values)


class Position(NamedTuple):
    """Position of a training.

    Attributes:
        step: number of optimizer steps done.
        epoch: number of the current epoch, from 1.
        epochs: the argument of ``loader.epochs()``; None if unknown.
        percent: completed part of the current epoch, in percent.
        seconds_left: until the end of the last epoch, at the mean speed since the ranks started; None if unknown.
    """

    step: int
    epoch: int
    epochs: int | None
    percent: int
    seconds_left: float | None

    def __str__(self) -> str:
        """Format it as ``epoch 2 of 8, 45 %, 12 min left``."""
        of = f" of {self.epochs}" if self.epochs else ""
        left = "" if self.seconds_left is None else f", {span(self.seconds_left)} left"
        return f"epoch {self.epoch}{of}, {self.percent} %{left}"


def position(run: Run, now: float) -> Position | None:
    """Return the position of a running training; None without ``ctx.loader`` and ``ctx.optimizer``."""
    ranks = of_start(read(run.attempt_folder, rank=0))
    windows = [one for one in ranks[0].windows if one.place.length] if ranks else []
    if not windows:
        return None
    first, last = windows[0], windows[-1]
    place, seconds = last.place, now - first.start - first.seconds
    batches, seconds_left = _done(place) - _done(first.place), None
    if place.epochs and batches > 0:
        ahead = place.left + (place.epochs - place.epoch) * place.length
        # Time since the last window is not subtracted: it may be an evaluation, a checkpoint or a pause.
        seconds_left = max(0.0, ahead * seconds / batches)
    percent = 100 * (place.length - place.left) // place.length
    return Position(last.first + last.steps, place.epoch, place.epochs or None, percent, seconds_left)


def _done(place: Place) -> int:
    return place.epoch * place.length - place.left
