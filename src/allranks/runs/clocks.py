"""GPUs whose clocks are kept below those of the others, by the agents' samples.

A rank's times are those of its CPU, which is ahead of its GPU: they do not show which GPU is slow. Its clock does.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from allranks.runs.usage import clock, format_clock

#: A GPU is slow if its clock, as a part of its highest one, is at most so many times that of the median GPU.
_FACTOR = 0.85
#: A sample that is so many seconds older than the newest one does not count.
_OLD = 30.0


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
