"""The networks of a job: as the user gives them, or as ``allranks test`` has measured them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from allranks.errors import AllranksError, UsageError
from allranks.estimate.tables import NETWORKS, Network
from allranks.job.problems import closest
from allranks.job.units import format_count, parse_rate
from allranks.record import selftest
from allranks.runs.record import newest_first

if TYPE_CHECKING:
    from allranks.runs.record import Run


def named(text: str) -> Network:
    """Return the network of a name, such as ``100GbE``, or of bytes a second, such as ``25GB/s``.

    Raises:
        UsageError: it is neither.
    """
    known = {name.lower(): network for name, network in NETWORKS.items()}
    if found := known.get(text.lower()):
        return found
    try:
        return Network(text, parse_rate(text), "both")
    except ValueError as error:
        near = closest(text, NETWORKS)
        fix = (
            f"did you mean {near}?" if near else f"bytes per second, such as 12.5GB/s, or one of {', '.join(NETWORKS)}"
        )
        raise UsageError(f"--network: unknown network {text!r}", fix=fix) from error


def measured(runs_folder: Path, size: int) -> Iterator[Network]:
    """Yield what self-tests in a runs directory have measured, the newest first, with messages of about ``size``."""
    with suppress(AllranksError):  # No run, or none that this user may read.
        for run in newest_first(runs_folder):
            if run.record.name == "test" and (found := _of(run, size)):
                yield found


def _of(run: Run, size: int) -> Network | None:
    """Return what a self-test has measured: the bandwidth of a ring in which each of n ranks sends.

    An all-reduce of S bytes sends 2 (n - 1) / n S bytes: NVIDIA's nccl-tests call the quotient with its time "busbw".
    """
    reports = selftest.read(run.attempt_folder)
    hosts = {one.host for one in reports if isinstance(one, selftest.RankInfo)}
    ranks = max((one.world_size for one in reports if isinstance(one, selftest.RankInfo)), default=0)
    times = [one for one in reports if isinstance(one, selftest.Bandwidth) and not one.wrong and one.seconds > 0]
    if ranks < 2 or not times:
        return None
    nearest = min({one.size for one in times}, key=lambda each: abs(math.log(each / max(1, size))))
    seconds = max(one.seconds for one in times if one.size == nearest)
    where = f"{run.record.id}, {format_count(ranks, 'rank')} on {format_count(len(hosts), 'node')}"
    place: Literal["within", "between"] = "within" if len(hosts) == 1 else "between"
    return Network(where, 2 * (ranks - 1) / ranks * nearest / seconds, place, measured=True)
