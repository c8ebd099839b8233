"""The means that are written every few steps, without stopping the steps for it."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed

from allranks.runtime.metrics.flight import Flight
from allranks.runtime.metrics.sums import Sums, means, merge, pack, plain_rows

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from allranks.runtime.context import Context
    from allranks.runtime.metrics.totals import Totals

#: How many ranks have left something for rank 0 in the store.
_RESTS = "metrics/rests"
#: Steps that a record may be on its way before the host waits for it: a GPU is so many steps behind at most.
_STEPS_ON_THE_WAY = 8
_CPU = torch.device("cpu")

Writer = Callable[[int, "dict[str, float]", float], None]


class Records:
    """Sends the means since the last record on their way every few steps, and writes them when they are there.

    Args:
        ctx: the rank, its progress, and the ways to the other ranks.
        totals: knows the names of the metrics that the ranks have.
        every: optimizer steps from one record to the next; 0 for none.
        store: what the ranks share.
        write: takes step, values and time of a record; called on rank 0.

    Attributes:
        window: what was logged since the last record.
        next: the step at which the next record is due.
    """

    def __init__(self, ctx: Context, totals: Totals, every: int, store: Store | None, write: Writer) -> None:
        self._ctx = ctx
        self._progress = ctx.progress
        self._totals = totals
        self._every = every
        self._store = store
        self._writer = write
        adds_there = ctx.world_size == 1 or "nccl" in ctx.backend
        self._on_gpu = ctx.device if ctx.device.type == "cuda" and adds_there else None
        self.window: dict[str, Sums] = {}
        self.next = float(every or math.inf)
        #: On their way; each is looked at on all ranks when so many records have been started after it.
        self._flights: deque[Flight] = deque()
        #: Those of them that rank 0 has yet to write.
        self.unwritten: deque[Flight] = deque()
        self._most_flights = math.ceil(_STEPS_ON_THE_WAY / every) if every else 0
        self._last = (ctx.progress.step, time.time())

    def add(self, fresh: dict[str, Sums]) -> None:
        """Take sums into the next record; they are not the caller's any more."""
        if self._every and self.window:
            merge(self.window, fresh)
        elif self._every:
            self.window = fresh

    def go_on(self, step: int) -> None:
        """Go on after a step that was loaded."""
        self._last = (step, time.time())
        if self._every:
            self.next = (step // self._every + 1) * self._every

    def start(self) -> None:
        """Send a record on its way. A name that is new to the ranks comes with a later one, but for the first."""
        while len(self._flights) >= self._most_flights:
            self._land()
        window, step = self.window, self._progress.step
        self.next = (step // self._every + 1) * self._every
        if self._ctx.world_size == 1 and not self.unwritten and (rows := plain_rows(window)) is not None:
            self.window = {}
            self._write_means(step, window, rows)
            return
        if not self._totals.agreed or self._ctx.world_size == 1:
            self._totals.agree(window)
        box = pack(window, self._totals.names, self._on_gpu or _CPU)
        self.window = {name: sums for name, sums in window.items() if name not in self._totals.names}
        group = None
        if self._ctx.world_size > 1:
            group = distributed.group.WORLD if self._on_gpu else self._ctx.control.group
        flight = Flight(step, list(self._totals.names), box, group, self._speed(step), time.time())
        self._flights.append(flight)
        if self._ctx.rank == 0:
            self.unwritten.append(flight)
            if self.unwritten[0].done():
                self._write(self.unwritten.popleft())

    def look(self) -> None:
        """On rank 0: write the oldest record that is on its way, if it has come."""
        if self.unwritten[0].done():
            self._write(self.unwritten.popleft())

    def land(self) -> None:
        """Wait for all records on their way; all ranks do at the same point."""
        while self._flights:
            self._land()

    def hand_over(self) -> None:
        """Before the end: leave what no record holds yet for rank 0, without a message that others must take.

        A job that was asked to stop has it in its checkpoint and goes on from there.
        """
        if self._ctx.rank == 0 or self._store is None or self._progress.stopping or not self.window:
            return
        rows = pack(self.window, list(self.window), _CPU).tolist()
        try:
            self._store.set(_rest(self._ctx.rank), json.dumps(named(list(self.window), rows[:-1])))
            self._store.add(_RESTS, 1)
        except RuntimeError:
            pass  # The store went with rank 0, and so did what writes the metrics.

    def finish(self) -> None:
        """At the end, when all ranks have handed over: write what is left."""
        self.land()
        if self._ctx.rank == 0 and self._every and not self._progress.stopping:
            self._write_rest()

    def _land(self) -> None:
        """Wait for the oldest record on its way. All ranks do at the same point, since they agree by what it says."""
        flight = self._flights.popleft()
        if flight.rows()[-1][0]:
            self._totals.agreed = False
        if self.unwritten and self.unwritten[0] is flight:
            self._write(self.unwritten.popleft())

    def _write(self, flight: Flight) -> None:
        values = means(flight.names, flight.rows()[:-1])
        if values:
            self._writer(flight.step, {**values, **flight.extra}, flight.when)

    def _speed(self, step: int) -> dict[str, float]:
        """Give steps, and samples over all ranks, per second since the last record."""
        (before, began), self._last = self._last, (step, time.time())
        seconds = self._last[1] - began
        if seconds <= 0 or step <= before:
            return {}
        speed = (step - before) / seconds
        # round(speed, 3) would take longer than all that is logged in a step.
        extra = {"steps_per_second": round(speed * 1e3) / 1e3}
        if self._progress.full:
            extra["samples_per_second"] = round(speed * self._progress.full * self._progress.accumulation * 10) / 10
        return extra

    def _write_rest(self) -> None:
        window, store = self.window, self._store
        if store is not None and store.add(_RESTS, 0):
            for rank in range(1, self._ctx.world_size):
                if store.check([_rest(rank)]):
                    merge(window, {name: Sums(*sums) for name, sums in json.loads(store.get(_rest(rank))).items()})
        self._write_means(self._progress.step, window, pack(window, list(window), _CPU).tolist()[:-1])

    def _write_means(self, step: int, names: Iterable[str], rows: Sequence[Sequence[float]]) -> None:
        extra = self._speed(step)
        values = means(names, rows)
        if values:
            self._writer(step, {**values, **extra}, self._last[1])


def named(names: list[str], rows: list[list[float]]) -> dict[str, list[float]]:
    """Give sum and weight by name, of those metrics that anything was logged for."""
    return {name: sums for name, sums in zip(names, rows, strict=True) if sums[1] > 0}


def _rest(rank: int) -> str:
    return f"metrics/rest/{rank}"
