"""Bandwidth in bytes per second: of collectives over all ranks, and between two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import distributed

from allranks.record.selftest import Bandwidth, Link, TrainingMessage
from allranks.runtime.model.allreduce import make_shared
from allranks.selftest.collectives import is_any, is_unsupported, synchronize

if TYPE_CHECKING:
    from allranks.runtime.context import Context
    from allranks.runtime.model.allreduce import SharedMessage

#: Bytes of the smallest message, and the factor from one size to the next.
_SMALLEST, _FACTOR = 1 << 10, 4
_REPEATS = 4
#: Messages up to this size are repeated more often, because other load on a node disturbs them more.
_SMALL, _REPEATS_OF_SMALL = 1 << 20, 16
#: Repeats of transfers through shared memory, which are the shortest and disturbed most.
_REPEATS_IN_MEMORY = 64
#: A message that takes longer than this, in seconds, is the last one.
_LONG = 0.5
#: Message sizes in bytes of operations other than all-reduce.
_EXCHANGED = (1 << 16, 1 << 20, 1 << 24)
#: Message sizes in bytes between two ranks.
_SENT = (1 << 16, 1 << 20, 1 << 24)
_SENDINGS, _LONG_LINK = 3, 0.1
#: After this many seconds no further ring is started: then ranks have no separate fast network cards.
_ENOUGH = 20.0


def by_size(ctx: Context, largest: int) -> Iterator[Bandwidth]:
    """All-reduce messages of increasing size from 1 KiB, up to one that takes long on any rank; collective."""
    size = _SMALLEST
    while size <= largest:
        measured = _all_reduced(ctx, size)
        yield measured
        if is_any(ctx, f"stop after {size}", bool(measured.wrong) or measured.seconds > _LONG):
            return
        size *= _FACTOR


def _all_reduced(ctx: Context, size: int) -> Bandwidth:
    values = torch.full((size // 4,), ctx.rank % 64 + 1.0, device=ctx.device)
    distributed.all_reduce(values)
    total = float(sum(rank % 64 + 1 for rank in range(ctx.world_size)))
    least, greatest = float(values.min()), float(values.max())
    wrong = "" if least == greatest == total else f"all numbers must be {total:g}, and are {least:g} to {greatest:g}"
    values.zero_()
    return Bandwidth(
        ctx.rank, size, _median_seconds(ctx, _repeats(size), lambda: distributed.all_reduce(values)), wrong
    )


def _repeats(size: int) -> int:
    return _REPEATS_OF_SMALL if size <= _SMALL else _REPEATS


def _median_seconds(ctx: Context, repeats: int, operation: Callable[[], object]) -> float:
    times = []
    for _ in range(repeats):
        synchronize(ctx.device)
        began = time.perf_counter()
        operation()
        synchronize(ctx.device)
        times.append(time.perf_counter() - began)
    return median(times)


def in_training(ctx: Context) -> Iterator[TrainingMessage]:
    """Measure the operations of FSDP, and averaging through shared memory on CPUs of one machine; collective."""
    for size in _EXCHANGED:
        found = [*_exchanged(ctx, size)]
        yield from found
        if is_any(ctx, f"stop exchanging after {size}", any(one.seconds > _LONG for one in found)):
            return


def _exchanged(ctx: Context, size: int) -> Iterator[TrainingMessage]:
    part = torch.zeros(max(1, size // 4 // ctx.world_size), device=ctx.device)
    complete = part.repeat(ctx.world_size)
    size = complete.nbytes
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    ways: dict[str, Callable[[], object]] = {
        "all_gather": lambda: gather(complete, part),
        "reduce_scatter": lambda: scatter(part, complete),
    }
    if ctx.device.type == "cpu" and ctx.local_world_size == ctx.world_size:
        parameter = torch.nn.Parameter(complete.clone())
        if shared := make_shared([parameter], complete.clone(), ctx.control):
            ways["shared memory"] = lambda: _average(shared, parameter, complete)
    for name, operation in ways.items():
        try:
            operation()
        except RuntimeError as error:
            if not is_unsupported(error):
                raise
        else:
            repeats = _REPEATS_IN_MEMORY if name == "shared memory" else _repeats(size)
            yield TrainingMessage(ctx.rank, name, size, _median_seconds(ctx, repeats, operation))


@torch.no_grad()
def _average(shared: SharedMessage, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    parameter.grad = gradient
    shared.send()
    shared.receive()


def links(ctx: Context) -> Iterator[Link]:
    """Send bytes between neighbours in each of :func:`rings` in turn, in both directions; collective."""
    node_of = [0] * ctx.world_size
    distributed.all_gather_object(node_of, ctx.node_rank)
    began = time.perf_counter()
    for number, ring in enumerate(rings(node_of)):
        for pairs in rounds(ring):
            for source, target in pairs:
                if ctx.rank == source:
                    yield _send(ctx, target)
                elif ctx.rank == target:
                    _receive(ctx, source)
            distributed.barrier()  # No rank takes part in two transfers at the same time.
        if is_any(ctx, f"stop after ring {number}", time.perf_counter() - began > _ENOUGH):
            return


def rings(node_of: Sequence[int]) -> list[list[int]]:
    """Return rings of ranks across nodes: one of the first ranks of all nodes, one of the second ranks, and so on.

    Each rank of a node may have its own network card beside its GPU, or share one; so rings are measured one at a time.
    On a single node all its ranks form the ring.
    """
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        ranks.setdefault(node, []).append(rank)
    if len(ranks) == 1:
        return [*ranks.values()]
    found = []
    for row in zip_longest(*(ranks[node] for node in sorted(ranks))):
        ring = [rank for rank in row if rank is not None]  # Nodes may have different numbers of ranks.
        if len(ring) > 1:
            found.append(ring)
    return found


def rounds(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return (sender, receiver) pairs of neighbours in a ring, both ways, in rounds with one partner per rank."""
    count = len(members)
    ring = [(members[place], members[(place + 1) % count]) for place in range(count if count > 2 else count - 1)]
    paired = count - count % 2
    found = []
    for pairs in (ring[0:paired:2], ring[1:paired:2], ring[paired:]):
        if pairs:
            found += [pairs, [(other, one) for one, other in pairs]]
    return found


def _send(ctx: Context, target: int) -> Link:
    """Send messages of increasing size until one takes long; announce each size to the receiver."""
    ready = torch.zeros(1, dtype=torch.uint8, device=ctx.device)
    for size in _SENT:
        distributed.send(torch.tensor([size], device=ctx.device), target)
        data = torch.zeros(size, dtype=torch.uint8, device=ctx.device)
        times = []
        for _ in range(_SENDINGS):
            distributed.recv(ready, target)
            synchronize(ctx.device)
            began = time.perf_counter()
            distributed.send(data, target)
            distributed.recv(ready, target)
            synchronize(ctx.device)
            times.append(time.perf_counter() - began)
        link = Link(ctx.rank, target, size, min(times))
        if link.seconds > _LONG_LINK:
            break
    distributed.send(torch.tensor([0], device=ctx.device), target)
    return link


def _receive(ctx: Context, source: int) -> None:
    order = torch.tensor([0], device=ctx.device)
    ready = torch.zeros(1, dtype=torch.uint8, device=ctx.device)
    distributed.recv(order, source)
    while size := int(order.item()):
        data = torch.empty(size, dtype=torch.uint8, device=ctx.device)
        for _ in range(_SENDINGS):
            distributed.send(ready, source)
            distributed.recv(data, source)
            distributed.send(ready, source)
        distributed.recv(order, source)
