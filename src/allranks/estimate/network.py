"""Speeds of networks: by name, as the user gives them, or as ``allranks test`` has measured them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from allranks.errors import AllranksError, UsageError
from allranks.job.problems import closest
from allranks.job.units import format_count, parse_rate
from allranks.record import selftest
from allranks.record.estimate import SHARED_MEMORY
from allranks.runs.record import Run, newest_first


@dataclass(frozen=True)
class Network:
    """A network, with the bytes per second that one node, or one GPU, sends and receives at the same time.

    Attributes:
        name: as the user writes it, or where it was measured.
        bandwidth: bytes per second, in each direction.
        place: between the GPUs of a node, between nodes, or both.
        curves: for each operation the measured messages: bytes that a rank sends (for shared memory: of the
           gradients), ascending, and seconds. Empty if the bandwidth is nominal.
        on_cpus: whether it was measured with tensors on CPUs.
    """

    name: str
    bandwidth: float
    place: Literal["within", "between", "both"]
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    on_cpus: bool = False

    def serves(self, nodes: int) -> bool:
        """Whether ranks on ``nodes`` nodes send over it."""
        return self.place in ("both", "within" if nodes == 1 else "between")

    def seconds(self, operation: str, sent: float) -> float:
        """Return the seconds of an operation in which a rank sends ``sent`` bytes."""
        curve = self.curves.get(operation) or self.curves.get("all_reduce")
        return interpolated(curve, sent) if curve else sent / self.bandwidth


def interpolated(curve: Sequence[tuple[float, float]], size: float) -> float:
    """Return the seconds for a size, interpolated by a power law between its neighbours.

    Below the smallest size the time is constant (latency), and above the largest the rate is.
    """
    (least, latency), (most, longest) = curve[0], curve[-1]
    if size <= least:
        return latency
    if size >= most:
        return longest * size / most
    (below, before), (above, after) = next(pair for pair in pairwise(curve) if size <= pair[1][0])
    return before * math.exp(math.log(after / before) * math.log(size / below) / math.log(above / below))


#: Ethernet: IEEE 802.3. InfiniBand, four lanes: IBTA's roadmap. PCIe, 16 lanes: PCI-SIG, base specifications 4.0 and
#: 5.0. NVLink: all links of one GPU in one direction, half of the totals in NVIDIA's data sheets of A100, H100, B200.
NETWORKS = {
    **{f"{rate}GbE": Network(f"{rate}GbE", rate * 1e9 / 8, "between") for rate in (1, 10, 25, 40, 100, 200, 400)},
    **{
        name: Network(name, rate * 1e9 / 8, "between")
        for name, rate in {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}.items()
    },
    "PCIe4": Network("PCIe4", 31.5e9, "within"),
    "PCIe5": Network("PCIe5", 63e9, "within"),
    "NVLink3": Network("NVLink3", 300e9, "within"),
    "NVLink4": Network("NVLink4", 450e9, "within"),
    "NVLink5": Network("NVLink5", 900e9, "within"),
}


def named(text: str) -> Network:
    """Return the network for a name, such as ``100GbE``, or a rate, such as ``25GB/s``.

    Raises:
        UsageError: the text is neither.
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
    """Yield the networks that self-tests in a runs directory have measured, newest first."""
    with suppress(AllranksError):  # No run, or none that this user may read.
        for run in newest_first(runs_folder):
            if run.record.name == "test" and (found := _of(run)):
                yield found


def _of(run: Run) -> Network | None:
    """Return the network that a self-test has measured: seconds of messages by the bytes that each of n ranks sends.

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
