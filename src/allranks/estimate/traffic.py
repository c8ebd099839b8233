"""What ranks send in a step, message by message, and how long that takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from allranks.estimate.tables import SHARED_MEMORY, Network

if TYPE_CHECKING:
    from allranks.estimate.arithmetic import Needs, Strategy


def is_shared(needs: Needs, strategy: Strategy, nodes: int, network: Network | None) -> bool:
    """Whether ranks average gradients through the memory of their machine, and send none."""
    if network is None or strategy != "ddp" or nodes > 1 or not needs.shared:
        return False
    return SHARED_MEMORY in network.curves


def seconds(needs: Needs, strategy: Strategy, ranks: int, nodes: int, network: Network) -> float:
    """Return how long the communication of a step takes, if nothing is computed meanwhile."""
    if is_shared(needs, strategy, nodes, network):
        return network.seconds(SHARED_MEMORY, needs.shared)
    found = _of_ddp(needs, network) if strategy == "ddp" else _of_fsdp(needs)
    return sum(network.seconds(name, size * (ranks - 1) / ranks) for name, size in found)


def _of_ddp(needs: Needs, network: Network) -> Iterator[tuple[str, float]]:
    """Yield each all-reduce, with what infinitely many ranks would send: twice its bytes."""
    for size in needs.messages_of_cpus if network.on_cpus else needs.messages:
        yield "all_reduce", 2 * size


def _of_fsdp(needs: Needs) -> Iterator[tuple[str, float]]:
    """Yield what gathers the root once, and each other part twice, in a micro-batch, and what scatters gradients."""
    rest = needs.gathered - needs.root - sum(needs.units)
    parts = [each for each in (*needs.units, rest) if each > 0]
    for size in [needs.root, *parts, *parts] * needs.accumulation:
        if size:
            yield "all_gather", size
    for size in (needs.root, *parts):
        if size:
            yield "reduce_scatter", size * needs.sent / needs.gathered
