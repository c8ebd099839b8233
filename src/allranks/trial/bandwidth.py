"""How many bytes a second: of all ranks together, and between two of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import distributed

from allranks.runs.trial import Bandwidth, Link
from allranks.trial.agreeing import is_any
from allranks.trial.collectives import synchronize

if TYPE_CHECKING:
    from allranks.runtime.context import Context

#: Bytes of the smallest message; each one is four times the one before.
_SMALLEST, _FACTOR = 1 << 10, 4
_REPEATS = 4
#: A message that takes longer is the last one: the next would take four times as long.
_LONG = 0.5
#: Bytes that go from one rank to another alone.
_SENT = (1 << 16, 1 << 20, 1 << 24)
_SENDINGS, _LONG_LINK = 3, 0.1


def by_size(ctx: Context, largest: int) -> Iterator[Bandwidth]:
    """All-reduce messages of 1 KiB and more; all ranks call it.

    Args:
        ctx: this rank.
        largest: bytes of the largest message; less where one takes long on any rank.
    """
    size = _SMALLEST
    while size <= largest:
        told = _all_reduced(ctx, size)
        yield told
        if is_any(ctx, f"stop after {size}", bool(told.wrong) or told.seconds > _LONG):
            return
        size *= _FACTOR


def _all_reduced(ctx: Context, size: int) -> Bandwidth:
    values = torch.full((size // 4,), ctx.rank % 64 + 1.0, device=ctx.device)
    distributed.all_reduce(values)
    total = float(sum(rank % 64 + 1 for rank in range(ctx.world_size)))
    least, greatest = float(values.min()), float(values.max())
    wrong = "" if least == greatest == total else f"all numbers must be {total:g}, and are {least:g} to {greatest:g}"
    values.zero_()
    times = []
    for _ in range(_REPEATS):
        synchronize(ctx.device)
        began = time.perf_counter()
        distributed.all_reduce(values)
        synchronize(ctx.device)
        times.append(time.perf_counter() - began)
    return Bandwidth(ctx.rank, size, median(times), wrong)


def links(ctx: Context) -> Iterator[Link]:
    """Send bytes from the first rank of each node to that of the next and back, or from rank to rank of one node."""
    for pairs in rounds(_members(ctx)):
        for source, target in pairs:
            if ctx.rank == source:
                yield _send(ctx, target)
            elif ctx.rank == target:
                _receive(ctx, source)
        distributed.barrier()  # What goes on at the same time goes on between other ranks.


def rounds(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return who sends to whom: neighbours in a ring, both ways, in rounds in which each member has one partner."""
    count = len(members)
    ring = [(place, (place + 1) % count) for place in range(count if count > 2 else count - 1)]
    parts = ([pair for pair in ring[: count - count % 2] if pair[0] % 2 == odd] for odd in (0, 1))
    forward = [*parts, ring[count - 1 :] if count % 2 else []]
    named = [[(members[one], members[other]) for one, other in pairs] for pairs in forward if pairs]
    return [way for pairs in named for way in (pairs, [(other, one) for one, other in pairs])]


def _members(ctx: Context) -> list[int]:
    """Return the first rank of each node, or all ranks where there is one node."""
    node_of: list[tuple[int, int]] = [(0, 0)] * ctx.world_size
    distributed.all_gather_object(node_of, (ctx.node_rank, ctx.rank))
    firsts = dict(sorted(node_of, reverse=True))
    return [firsts[node] for node in sorted(firsts)] if len(firsts) > 1 else list(range(ctx.world_size))


def _send(ctx: Context, target: int) -> Link:
    """Send more and more bytes, until they take long; the receiver is told how many before."""
    for size in _SENT:
        order = torch.tensor([size], device=ctx.device)
        distributed.send(order, target)
        data = torch.zeros(size, dtype=torch.uint8, device=ctx.device)
        told = Link(ctx.rank, target, size, min(_sent(ctx, data, target) for _ in range(_SENDINGS)))
        if told.seconds > _LONG_LINK:
            break
    distributed.send(torch.tensor([0], device=ctx.device), target)
    return told


def _sent(ctx: Context, data: torch.Tensor, target: int) -> float:
    word = torch.zeros(1, dtype=torch.uint8, device=ctx.device)
    distributed.recv(word, target)  # It is ready.
    synchronize(ctx.device)
    began = time.perf_counter()
    distributed.send(data, target)
    distributed.recv(word, target)
    synchronize(ctx.device)
    return time.perf_counter() - began


def _receive(ctx: Context, source: int) -> None:
    order = torch.tensor([0], device=ctx.device)
    word = torch.zeros(1, dtype=torch.uint8, device=ctx.device)
    distributed.recv(order, source)
    while size := int(order.item()):
        data = torch.empty(size, dtype=torch.uint8, device=ctx.device)
        for _ in range(_SENDINGS):
            distributed.send(word, source)
            distributed.recv(data, source)
            distributed.send(word, source)
        distributed.recv(order, source)
