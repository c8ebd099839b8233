"""The networks of a job: as the user gives them, or as ``allranks test`` has measured them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from allranks.errors import AllranksError, UsageError
from allranks.estimate.tables import NETWORKS, SHARED_MEMORY, Network
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


def measured(runs_folder: Path) -> Iterator[Network]:
    """Yield what self-tests in a runs directory have measured, the newest first."""
    with suppress(AllranksError):  # No run, or none that this user may read.
        for run in newest_first(runs_folder):
            if run.record.name == "test" and (found := _of(run)):
                yield found


def _of(run: Run) -> Network | None:
    """Return what a self-test has measured: how long messages take by the bytes that each of n ranks sends.

    In rings, an all-reduce of S bytes sends 2 (n - 1) / n S bytes (NVIDIA's nccl-tests call the quotient with its time
    "busbw"), an all-gather and a reduce-scatter half of that.
    """
    reports = selftest.read(run.attempt_folder)
    infos = [one for one in reports if isinstance(one, selftest.RankInfo)]
    hosts, ranks = {one.host for one in infos}, max((one.world_size for one in infos), default=0)
    if ranks < 2 or not (curves := _curves(reports, (ranks - 1) / ranks)).get("all_reduce"):
        return None
    where = f"{run.record.id}, {format_count(ranks, 'rank')} on {format_count(len(hosts), 'node')}, {infos[0].backend}"
    place: Literal["within", "between"] = "within" if len(hosts) == 1 else "between"
    best = max(sent / seconds for sent, seconds in curves["all_reduce"])
    return Network(where, best, place, curves, on_cpus=infos[0].device == "cpu")


def _curves(reports: list[selftest.SelfTestReport], share: float) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of the slowest rank, by operation and bytes sent."""
    slowest: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for one in reports:
        if isinstance(one, selftest.Bandwidth) and not one.wrong:
            name, sent = "all_reduce", 2 * share * one.size
        elif isinstance(one, selftest.TrainingMessage):
            name, sent = one.name, one.size * (1 if one.name == SHARED_MEMORY else share)
        else:
            continue
        if one.seconds > 0:
            slowest[name][sent] = max(slowest[name][sent], one.seconds)
    return {name: sorted(found.items()) for name, found in slowest.items()}
