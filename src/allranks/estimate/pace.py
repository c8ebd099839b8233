"""How long a step takes, and what it costs, on each number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allranks.estimate.arithmetic import Needs, Row

#: Steps of the first row whose samples the cost is of.
_STEPS = 1000


@dataclass(frozen=True)
class Pace:
    """How fast the job of a row is; what is unknown is None.

    Attributes:
        step_seconds: of a step at most: its computation, and then its communication.
        speedup: samples per second compared with the first row; each rank has as many of them if the batch is unknown.
        cost: of as many samples as 1,000 steps of the first row have, in the currency of the price.
    """

    step_seconds: float | None = None
    speedup: float | None = None
    cost: float | None = None


def paces(needs: Needs, rows: Sequence[Row], compute: float, price: float | None) -> list[Pace]:
    """Return the pace of each row.

    A rank computes for longer with more samples, in proportion; communication is not hidden behind computation, so that
    a step takes as long as is given here, or less.

    Args:
        needs: of the job.
        rows: its estimate.
        compute: seconds that a rank of the first row computes in a step.
        price: of a rank for an hour.
    """
    found: list[Pace] = []
    batch, base = rows[0].rank_batch, None
    for row in rows:
        own = compute * row.rank_batch / batch if row.rank_batch and batch else compute
        if row.seconds is None:
            found.append(Pace())
            continue
        seconds = own + row.seconds
        rate = (row.effective_batch or row.ranks) / seconds
        base = base or rate
        samples = _STEPS * (rows[0].effective_batch or rows[0].ranks)
        cost = None if price is None else samples / rate / 3600 * row.ranks * price
        found.append(Pace(seconds, rate / base, cost))
    return found
