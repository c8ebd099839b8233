"""Reads the runs that ``allranks watch`` lists: only those that fit on the screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.errors import AllranksError
from allranks.runs.record import Run, load
from allranks.runs.status import State
from allranks.runs.steptime import Position, position
from allranks.view.feed import LiveStatus, Metrics

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind


@dataclass(frozen=True)
class Row:
    """A run of several: its step, the last value of each metric, and where it is in its epochs, if that is known."""

    run: Run
    step: int | None
    last: Mapping[str, float]
    problem: str = ""
    position: Position | None = None


@dataclass(frozen=True)
class Rows:
    """Some runs of a list, of which the first is number ``top``, counted from 0, of ``total``."""

    rows: Sequence[Row] = ()
    top: int = 0
    total: int = 0


class RunsFeed:
    """Reads runs. ``find`` returns all, the newest first, and is called again each time; ``show`` is, by any thread."""

    def __init__(self, find: Callable[[], Sequence[Path]], kind_of: Callable[[str], ClusterKind]) -> None:
        self._find, self._kind_of = find, kind_of
        self._known: dict[Path, tuple[LiveStatus, Metrics]] = {}
        self._positions: dict[Path, Position | None] = {}
        self._shown = (0, 1)

    def show(self, top: int, most: int) -> None:
        """Read so many runs from one on, from the next call on."""
        self._shown = (top, most)

    def read(self) -> Rows:
        """Return the runs that are shown as they are now."""
        folders, (top, most) = self._find(), self._shown
        top = max(0, min(top, len(folders) - most))
        found = (self._read(folder) for folder in folders[top : top + most])
        return Rows([row for row in found if row], top, len(folders))

    def _read(self, folder: Path) -> Row | None:
        if folder not in self._known:
            try:
                run = load(folder)
                status = LiveStatus(run, self._kind_of(run.record.kind))
            except AllranksError:  # `allranks ps` reports it.
                return None
            self._known[folder] = status, Metrics(folder)
        status, metrics = self._known[folder]
        if status.read():
            is_running = status.run.record.status.state is State.RUNNING
            self._positions[folder] = position(status.run, time.time()) if is_running else None
        metrics.read()
        last = {name: curve.last for name, curve in metrics.curves.items()}
        return Row(status.run, metrics.step, last, status.problem, self._positions.get(folder))
