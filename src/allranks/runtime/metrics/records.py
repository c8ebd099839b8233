"""Writes means every few steps, without stopping the training."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed

from allranks.runtime.metrics.sums import Sums, Totals, means, merge, pack

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from allranks.runtime.context import Context

#: Key of the number of ranks that have left values for rank 0 in the store.
_RESTS = "metrics/rests"
#: A metric of the first name counts tokens of a rank's batch; a speed of the second name is derived from it.
_TOKENS, _TOKEN_SPEED = "tokens", "tokens_per_second"
#: Steps after which the host waits for a record: a GPU is at most that many steps behind.
_STEPS_ON_THE_WAY = 8
_CPU = torch.device("cpu")


@dataclass
class _Flight:
    """The sums of one record while they are reduced over all ranks.

    With NCCL the GPU does it, in order with its other work, and the result is then copied to the host. With gloo a gloo
    thread does it.

    Attributes:
        extra: values to write beside the means.
        when: the time of the step, in seconds since 1970.
        box: the result of :func:`pack`, with ``names`` for its rows; on the GPU if it is for NCCL.
    """

    step: int
    names: list[str]
    extra: dict[str, float]
    when: float
    box: torch.Tensor
    _work: Work | None = None
    _copied: torch.cuda.Event | None = None

    def start(self, group: ProcessGroup | None) -> None:
        """Start the reduction, unless there is only one rank; collective."""
        if group is not None:
            self._work = distributed.all_reduce(self.box, group=group, async_op=True)
        if self.box.is_cuda:
            if self._work is not None:
                self._work.wait()  # The GPU waits, not the host.
            on_host, self._work = torch.empty(self.box.shape, dtype=self.box.dtype, pin_memory=True), None
            self.box = on_host.copy_(self.box, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def done(self) -> bool:
        """Return whether :meth:`rows` will not block."""
        if self._copied is not None:
            return bool(self._copied.query())  # type: ignore[no-untyped-call]
        return self._work is None or self._work.is_completed()

    def rows(self) -> list[list[float]]:
        """Wait for the sums and weights over all ranks; return the rows of :func:`pack`."""
        if self._copied is not None:
            self._copied.synchronize()
        elif self._work is not None:
            self._work.wait()
            self._work = None
        rows: list[list[float]] = self.box.tolist()
        return rows


class Records:
    """Starts to average the logged values every ``ctx.log_every`` steps; rank 0 writes the means once they arrive.

    Attributes:
        window: sums of the values logged since the last record.
        next: the step at which the next record is due.
    """

    def __init__(self, ctx: Context, totals: Totals) -> None:
        self._ctx = ctx
        self._progress = ctx.progress
        self._totals = totals
        self._every = every = ctx.log_every
        adds_there = ctx.world_size == 1 or "nccl" in ctx.backend
        self._on_gpu = ctx.device if ctx.device.type == "cuda" and adds_there else None
        self.window: dict[str, Sums] = {}
        self.next = float(every or math.inf)
        #: Records in flight; all ranks read one once a fixed number of later ones has started.
        self._flights: deque[_Flight] = deque()
        #: The ones that rank 0 has not written yet.
        self.unwritten: deque[_Flight] = deque()
        self._most_flights = math.ceil(_STEPS_ON_THE_WAY / every) if every else 0
        self._last = (ctx.progress.step, time.time())
        self._handed_over = False

    def add(self, fresh: dict[str, Sums]) -> None:
        """Add sums to the next record; the caller must not use them afterwards."""
        if self._every and self.window:
            merge(self.window, fresh)
        elif self._every:
            self.window = fresh

    def resume(self, step: int) -> None:
        """Continue after a loaded step."""
        self._last = (step, time.time())
        if self._every:
            self.next = (step // self._every + 1) * self._every

    def start(self) -> None:
        """Start a record. A new metric comes with a later one, unless this is the first."""
        while len(self._flights) >= self._most_flights:
            self._land()
        window, step = self.window, self._progress.step
        self.next = (step // self._every + 1) * self._every
        if not self._totals.agreed or self._ctx.world_size == 1:
            self._totals.agree(window)
        box = pack(window, self._totals.names, self._on_gpu or _CPU)
        self.window = {name: sums for name, sums in window.items() if name not in self._totals.names}
        if self._handed_over:  # Called for the checkpoint at the end: the record holds what was handed to rank 0.
            self.hand_over()
        on_gpus = self._on_gpu is not None and self._ctx.world_size > 1
        group = distributed.group.WORLD if on_gpus else self._ctx.control.group
        flight = _Flight(step, list(self._totals.names), self._speed(step), self._last[1], box)
        flight.start(group)
        self._flights.append(flight)
        if self._ctx.rank == 0:
            self.unwritten.append(flight)
            self.poll()

    def poll(self) -> None:
        """Write the oldest record in flight if it has arrived; on rank 0."""
        if self.unwritten[0].done():
            self._write(self.unwritten.popleft())

    def land(self) -> None:
        """Wait for all records in flight; collective."""
        while self._flights:
            self._land()

    def hand_over(self) -> None:
        """Before the end, leave the values that no record holds for rank 0 in the store, without a collective.

        After a stop request they are in the checkpoint instead.
        """
        if self._ctx.rank == 0 or self._progress.stopping or not (self.window or self._handed_over):
            return
        rows = pack(self.window, list(self.window), _CPU).tolist()
        try:
            self._ctx._store.set(_rest(self._ctx.rank), json.dumps(named(list(self.window), rows[:-1])))
            self._ctx._store.add(_RESTS, 1)
            self._handed_over = True
        except RuntimeError:
            pass  # Rank 0, which writes the metrics, is gone with the store.

    def finish(self) -> None:
        """Write the remaining values, after all ranks have handed over."""
        self.land()
        if self._ctx.rank == 0 and self._every and not self._progress.stopping:
            self._write_rest()

    def _land(self) -> None:
        """Wait for the oldest record in flight; collective. It also shows whether a rank has new names."""
        flight = self._flights.popleft()
        if flight.rows()[-1][0]:
            self._totals.agreed = False
        if self.unwritten and self.unwritten[0] is flight:
            self._write(self.unwritten.popleft())

    def _write(self, flight: _Flight) -> None:
        self._put(flight.step, means(flight.names, flight.rows()[:-1]), flight.extra, flight.when)

    def _put(self, step: int, values: dict[str, float], speed: dict[str, float], when: float) -> None:
        if not values:
            return
        if _TOKENS in values and "steps_per_second" in speed:
            batches = speed["steps_per_second"] * self._progress.accumulation * self._ctx.world_size
            speed = {**speed, _TOKEN_SPEED: values.get(_TOKEN_SPEED, round(values[_TOKENS] * batches, 1))}
        self._ctx._tracker_group.write(step, {**values, **speed}, when)

    def _speed(self, step: int) -> dict[str, float]:
        """Return steps, and samples over all ranks, per second since the last record."""
        (before, began), self._last = self._last, (step, time.time())
        seconds = self._last[1] - began
        if seconds <= 0 or step <= before:
            return {}
        speed = (step - before) / seconds
        # round(speed, 3) takes longer than the logging of a step.
        extra = {"steps_per_second": round(speed * 1e3) / 1e3}
        if self._progress.full:
            extra["samples_per_second"] = round(speed * self._progress.full * self._progress.accumulation * 10) / 10
        return extra

    def _write_rest(self) -> None:
        window, store = self.window, self._ctx._store
        if store.add(_RESTS, 0):
            for rank in range(1, self._ctx.world_size):
                if store.check([_rest(rank)]):
                    merge(window, {name: Sums(*sums) for name, sums in json.loads(store.get(_rest(rank))).items()})
        step = self._progress.step
        speed = self._speed(step)
        self._put(step, means(window, pack(window, list(window), _CPU).tolist()[:-1]), speed, self._last[1])


def named(names: list[str], rows: list[list[float]]) -> dict[str, list[float]]:
    """Return sum and weight by name, of the metrics that have values."""
    return {name: sums for name, sums in zip(names, rows, strict=True) if sums[1] > 0}


def _rest(rank: int) -> str:
    return f"metrics/rest/{rank}"
