"""Resource usage of a run's nodes, as their agents sampled it."""

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

#: Bytes per second over the network of a node, and from and to disks by its ranks.
TRAFFIC = ("net_in", "net_out", "disk_read", "disk_write")
#: Workers that each use at least this part of a CPU are too few; those that wait this part of the time lack CPUs.
_BUSY, _QUEUED = 0.8, 0.3
#: A GPU is slow if its clock, relative to its maximum, is at most this part of the median GPU's.
_FACTOR = 0.85
#: A sample older than the newest one by more than this is ignored, in seconds.
_OLD = 30.0


def node_usage(attempt: Path) -> Iterator[dict[str, Any]]:
    """Yield the newest sample of each node, by its number: busy CPUs, bytes of memory, and its GPUs.

    ``cpus_total`` and ``memory_total`` are the job's limits on the node. They are None if the agent is of an earlier
    version; so are :data:`TRAFFIC`, which a first sample lacks too, and clocks and temperature of
    :meth:`allranks.system.gpus.Gpus.sample`. ``net_queued`` is the part of the last half minute in which packets waited
    to be sent. ``workers`` are the data-loader workers of each rank, by the rank's process id.
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
        count: number of workers.
        cpus: CPUs that they use in total.
        queued: further CPUs that they would use if they got them.
        blocked: number of workers that wait for a disk.
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
        """The fix: more workers if they compute all the time, else more of what they wait for."""
        if self._want_cpus:
            return "More CPUs for the job would help, and no more workers."
        if self.cpus + self.queued >= _BUSY * self.count:
            return "More workers for the loader would help."
        return "The workers wait themselves: faster storage would help, or more workers to wait at the same time."


def workers_of(
    attempt: Path, samples: Mapping[int, Mapping[str, Any]], ranks: Mapping[int, Collection[int]]
) -> Workers | None:
    """Sum up the data-loader workers of ranks, by node, in the nodes' samples; None if there are none, or old ones."""
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
    """Format the clock of a GPU and what slows it down: ``1.1 GHz (thermal)``; empty if unknown."""
    if not gpu.get("clock"):
        return ""
    return format_clock(gpu["clock"]) + (f" ({', '.join(gpu['slowed_by'])})" if gpu["slowed_by"] else "")


def format_clock(mhz: float) -> str:
    """Format a clock with three digits: ``1.75 GHz``."""
    return f"{mhz / 1000:.3g} GHz"


def traffic(node: Mapping[str, Any]) -> str:
    """Format the network traffic of a node and the disk traffic of its ranks, as far as known."""
    pairs = (("NET", "net_in", "net_out"), ("DISK", "disk_read", "disk_write"))
    known = [each for each in pairs if None not in (node.get(each[1]), node.get(each[2]))]
    return "  ".join(f"{name} ↓ {format_size(node[one])}/s ↑ {format_size(node[two])}/s" for name, one, two in known)


# --- slow GPUs: step times are those of the host, which runs ahead of its GPU, and do not show which GPU is slow ---


@dataclass(frozen=True)
class SlowGpus:
    """GPUs of one node that are throttled while others are not.

    Attributes:
        node: its number.
        host: its name.
        numbers: CUDA's numbers of the GPUs, which are the local ranks that use them.
        clocks: text with the clock of the slowest, what slows it down, and the median of all other GPUs.
    """

    node: int
    host: str
    numbers: tuple[int, ...]
    clocks: str

    def sentence(self, ranks: Mapping[int, int]) -> str:
        """Return the sentence to show; ``ranks`` maps local ranks of the node to ranks, if known."""
        if len(self.numbers) > 1:
            return f"{len(self.numbers)} GPUs of {self.host} run at {self.clocks}"
        (number,) = self.numbers
        which = f"the GPU of rank {ranks[number]} on" if number in ranks else f"GPU {number} of"
        return f"{which} {self.host} runs at {self.clocks}"


def slow_gpus(samples: Iterable[Mapping[str, Any]]) -> list[SlowGpus]:
    """Return the slow GPUs of each node by the newest samples, nodes with the most slow GPUs first."""
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
