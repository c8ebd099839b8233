"""Where the time of an attempt's steps went, as its ranks have recorded it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from allranks import contract
from allranks.record.steptime import NEWEST, PHASES, Window, read_windows

__all__ = ["NEWEST", "PHASES", "RankTimes", "Window", "of_start", "per_step", "read"]


class RankTimes(NamedTuple):
    """The windows of one rank, the oldest first, and the number of the node that it was on last."""

    rank: int
    node: int
    windows: list[Window]


def read(attempt: Path, newest: int | None = None) -> list[RankTimes]:
    """Return what the ranks of an attempt have recorded, in order; of each so many of its newest windows, or all.

    The :data:`NEWEST` are of about two seconds each, and older ones longer. A rank that does not make its steps with
    ``ctx.optimizer``, or has just started, is missing.
    """
    found: dict[int, RankTimes] = {}
    for path in sorted(attempt.glob(f"node-*/rank-*{contract.TIMES_SUFFIX}")):
        try:
            rank, node = int(path.stem.removeprefix("rank-")), int(path.parent.name.removeprefix("node-"))
        except ValueError:
            continue
        windows = read_windows(path, newest)
        if windows and rank in found:  # It was restarted on another node.
            here = node if windows[-1].start > found[rank].windows[-1].start else found[rank].node
            windows = sorted([*found[rank].windows, *windows])
            found[rank] = RankTimes(rank, here, windows)
        elif windows:
            found[rank] = RankTimes(rank, node, windows)
    return sorted(found.values())


def of_start(ranks: Sequence[RankTimes], restart: int | None = None) -> list[RankTimes]:
    """Return what the ranks have recorded since they were started last, or between two restarts."""
    if restart is None:
        restart = max((each.windows[-1].restart for each in ranks), default=0)
    kept = [each._replace(windows=[one for one in each.windows if one.restart == restart]) for each in ranks]
    return [each for each in kept if each.windows]


def per_step(windows: Sequence[Window], edges: Sequence[int]) -> list[list[float]]:
    """Return the seconds a step in each phase, between numbers of steps that follow each other.

    The windows, of one restart, cover all of these steps.
    """
    found, at = [], 0
    for low, high in pairwise(edges):
        spent = [0.0] * len(PHASES)
        while at < len(windows):
            window = windows[at]
            end = window.first + window.steps
            part = (min(high, end) - max(low, window.first)) / window.steps
            if part > 0:
                spent = [total + part * seconds for total, seconds in zip(spent, window.spent, strict=True)]
            if end > high:
                break
            at += 1
        found.append([seconds / (high - low) for seconds in spent])
    return found
