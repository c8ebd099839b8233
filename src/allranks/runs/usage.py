"""What the nodes of a run use, as their agents have sampled it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.job.units import format_size
from allranks.runs.agents import local_ranks

#: Bytes a second over the network of a node, and of its ranks from disks and to them.
TRAFFIC = ("net_in", "net_out", "disk_read", "disk_write")
#: Workers that use so much of a CPU each are too few; those that wait so long for one have too few CPUs.
_BUSY, _QUEUED = 0.8, 0.3
#: A GPU is slow if its clock, as a part of its highest one, is at most so many times that of the median GPU.
_FACTOR = 0.85
#: A sample that is so many seconds older than the newest one does not count.
_OLD = 30.0


def node_usage(attempt: Path) -> Iterator[dict[str, Any]]:
    """Yield the newest sample of each node, by its number: busy CPUs, bytes of memory, and its GPUs.

    ``cpus_total`` and ``memory_total`` are what the job may use there; None if the agent is of an earlier version, and
    likewise :data:`TRAFFIC`, which a first sample does not have, and what :meth:`allranks.system.gpus.Gpus.sample`
    returns of clocks and temperature. ``net_queued`` is the part of the last half minute in which packets waited to be
    sent, and ``workers`` are the data-loader workers of each rank, by the rank's process id.
    """
    for path in sorted(attempt.glob(f"node-*/{contract.USAGE}")):
        try:
            found = json.loads(path.read_text())
            gpus = [_gpu(at, gpu) for at, gpu in enumerate(found["gpus"])]
            named = {key: found[key] for key in ("host", "time", "cpus", "memory")}
            named |= {key: found.get(key) for key in ("cpus_total", "memory_total", "net_queued", *TRAFFIC)}
            named["workers"] = (
                {int(pid): each for pid, each in found["workers"].items()} if "workers" in found else None
            )
            yield {"node": int(path.parent.name.removeprefix("node-")), **named, "gpus": gpus}
        except (OSError, ValueError, TypeError, KeyError):
            continue  # Being written, or of another version.


@dataclass(frozen=True)
class Workers:
    """The data-loader workers of some ranks.

    Attributes:
        count: how many there are.
        cpus: CPUs that they use together.
        queued: how many more they would use, if they got them.
        blocked: how many a disk blocks.
    """

    count: int
    cpus: float
    queued: float
    blocked: int

    def __str__(self) -> str:
        who = "1 worker" if self.count == 1 else f"{self.count} workers"
        waits = f", waiting for a CPU {100 * self.queued / self.count:.0f} %" if self._want_cpus else ""
        blocked = f", {self.blocked} blocked by storage" if self.blocked else ""
        return f"{who} at {100 * self.cpus / self.count:.0f} %{waits}{blocked}"

    @property
    def _want_cpus(self) -> bool:
        return self.queued >= max(self.cpus, _QUEUED * self.count)

    @property
    def fix(self) -> str:
        """What would help: more of them if they compute all the time, and else what they wait for."""
        if self._want_cpus:
            return "More CPUs for the job would help, and no more workers."
        if self.cpus + self.queued >= _BUSY * self.count:
            return "More workers for the loader would help."
        return "The workers wait themselves: faster storage would help, or more workers to wait at the same time."


def workers_of(
    attempt: Path, samples: Mapping[int, Mapping[str, Any]], ranks: Mapping[int, Collection[int]]
) -> Workers | None:
    """Return the data-loader workers of ranks, by node, in the samples of these; None if there are none, or of old."""
    found = [
        each
        for node, wanted in ranks.items()
        if (sample := samples.get(node)) and sample["workers"]
        for pid, rank in local_ranks(attempt, node, "pid").items()
        if rank in wanted and (each := sample["workers"].get(pid)) and None not in each.values()
    ]
    if not found:
        return None
    return Workers(*(sum(each[key] for each in found) for key in ("count", "cpus", "queued", "blocked")))


def _gpu(at: int, found: dict[str, Any]) -> dict[str, Any]:
    known = {key: found[key] for key in ("busy", "memory", "total")}
    further = {key: found.get(key) for key in ("temperature", "clock", "max_clock")}
    return {"number": found.get("number", at), **known, **further, "slowed_by": found.get("slowed_by", [])}


def clock(gpu: Mapping[str, Any]) -> str:
    """Write the clock of a GPU and what slows it down: ``1.1 GHz (thermal)``; empty if that is not known."""
    if not gpu.get("clock"):
        return ""
    return format_clock(gpu["clock"]) + (f" ({', '.join(gpu['slowed_by'])})" if gpu["slowed_by"] else "")


def format_clock(mhz: float) -> str:
    """Write a clock with three digits: ``1.75 GHz``."""
    return f"{mhz / 1000:.3g} GHz"


def traffic(node: Mapping[str, Any]) -> str:
    """Write what a node receives and sends, and what its ranks read and write, where that is known."""
    pairs = (("NET", "net_in", "net_out"), ("DISK", "disk_read", "disk_write"))
    known = [each for each in pairs if None not in (node.get(each[1]), node.get(each[2]))]
    return "  ".join(f"{name} ↓ {format_size(node[one])}/s ↑ {format_size(node[two])}/s" for name, one, two in known)


# --- GPUs that are slow: a rank's times are those of its CPU, which is ahead of its GPU, and do not show which is ---


@dataclass(frozen=True)
class SlowGpus:
    """GPUs of one node that something slows down, and not the others.

    Attributes:
        node: its number.
        host: its name.
        numbers: of the GPUs, as CUDA counts them there, which are the local ranks that use them.
        clocks: that of the slowest, what slows it down, and the median of all other GPUs, in words.
    """

    node: int
    host: str
    numbers: tuple[int, ...]
    clocks: str

    def sentence(self, ranks: Mapping[int, int]) -> str:
        """Return the sentence to show; ``ranks`` are those of the node by local rank, if they are known."""
        if len(self.numbers) > 1:
            return f"{len(self.numbers)} GPUs of {self.host} run at {self.clocks}"
        (number,) = self.numbers
        which = f"the GPU of rank {ranks[number]} on" if number in ranks else f"GPU {number} of"
        return f"{which} {self.host} runs at {self.clocks}"


def slow_gpus(samples: Iterable[Mapping[str, Any]]) -> list[SlowGpus]:
    """Return the GPUs of each node that are slow in the newest samples of a run's nodes, those of most GPUs first."""
    nodes = [*samples]
    newest = max((node["time"] for node in nodes), default=0.0)
    gpus = [
        (node, gpu, gpu["clock"] / gpu["max_clock"])
        for node in nodes
        for gpu in node["gpus"]
        if node["time"] >= newest - _OLD and gpu["clock"] and gpu["max_clock"]
    ]
    usual = statistics.median_high(share for *_, share in gpus) if gpus else 0.0
    slow = [(node, gpu) for node, gpu, share in gpus if gpu["slowed_by"] and share <= _FACTOR * usual]
    others = [gpu["clock"] for _, gpu, share in gpus if share > _FACTOR * usual]
    found = list[SlowGpus]()
    for number, group in groupby(slow, lambda one: one[0]["node"]):
        of_node = [*group]
        worst = min((gpu for _, gpu in of_node), key=lambda gpu: gpu["clock"])
        clocks = f"{clock(worst)}, the others at {format_clock(statistics.median(others))}"
        found.append(SlowGpus(number, of_node[0][0]["host"], tuple(gpu["number"] for _, gpu in of_node), clocks))
    return sorted(found, key=lambda one: -len(one.numbers))
