"""Collective operations on data with exactly known results, and bandwidth over all ranks and between two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from allranks.record.selftest import Bandwidth, Collective, Link, OperationStarted, SelfTestReport, TrainingMessage
from allranks.runtime.model.allreduce import make_shared

if TYPE_CHECKING:
    from allranks.runtime.context import Context
    from allranks.runtime.model.allreduce import SharedMessage

#: Elements per rank: few, to measure latency instead of bandwidth.
_COUNT = 64
#: Texts in torch's errors for an operation that a backend does not support.
_UNSUPPORTED = ("not support", "unsupported", "not implemented", "no support")


class Case(NamedTuple):
    """An operation, the tensors or values that it fills, and their expected content."""

    run: Callable[[], object]
    results: list[Any]
    expected: list[Any]


Make = Callable[["Context"], Case]


def all_cases(world_size: int) -> dict[str, Make]:
    """Return all operations by name."""
    return {
        "all_reduce int64": partial(_all_reduce, dtype=torch.int64),
        "all_reduce float32": partial(_all_reduce, dtype=torch.float32),
        **{f"broadcast from rank {source}": partial(_broadcast, source=source) for source in (0, world_size - 1)},
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
        "gather": _gather,
        "scatter": _scatter,
        "send and receive": _ring,
        "barrier": _barrier,
        "all_gather_object": _all_gather_object,
    }


def try_all(ctx: Context, repeats: int) -> Iterator[SelfTestReport]:
    """Run each operation once for warm-up and ``repeats`` times more; collective."""
    for name, make in all_cases(ctx.world_size).items():
        yield OperationStarted(ctx.rank, name)
        yield _tried(ctx, name, make, repeats)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, operation: Callable[[], object]) -> float:
    """Return the seconds that an operation takes, its work on a GPU included."""
    synchronize(device)
    began = time.perf_counter()
    operation()
    synchronize(device)
    return time.perf_counter() - began


def exchange(ways: list[distributed.P2POp]) -> None:
    """Send and receive at the same time."""
    for work in distributed.batch_isend_irecv(ways):
        work.wait()


def is_any(ctx: Context, name: str, mine: bool) -> bool:
    """Return whether ``mine`` is true on any rank; collective, once for each name.

    It uses the store, because collective operations are under test.
    """
    store = ctx._store
    assert store is not None  # The process group is ours.
    key = f"trial/{name}"
    if mine:
        store.add(f"{key}/yes", 1)
    if store.add(f"{key}/asked", 1) == ctx.world_size:
        store.set(f"{key}/said", "yes" if store.add(f"{key}/yes", 0) else "no")
    return bool(store.get(f"{key}/said") == b"yes")


def _tried(ctx: Context, name: str, make: Make, repeats: int) -> Collective:
    if name == "send and receive" and ctx.world_size == 1:
        return Collective(ctx.rank, name, why_not="one rank has no neighbour")
    wrong, times = "", []
    try:
        for _ in range(1 + repeats):  # The first one opens connections and is not timed.
            case = make(ctx)
            times.append(timed(ctx.device, case.run))
            wrong = wrong or difference(_listed(case.results), case.expected)
    except (RuntimeError, NotImplementedError) as error:
        if not is_unsupported(error):
            raise
        return Collective(ctx.rank, name, why_not=str(error).splitlines()[0])
    return Collective(ctx.rank, name, wrong, median(times[1:]))


def is_unsupported(error: Exception) -> bool:
    """Whether torch reports that the backend does not support an operation."""
    return any(word in str(error).lower() for word in _UNSUPPORTED)


def difference(got: list[Any], expected: list[Any]) -> str:
    """Return the first difference of two lists as text; empty if they are equal."""
    for place, (one, other) in enumerate(zip(got, expected, strict=True)):
        if one != other:
            return f"number {place} must be {other}, and is {one}"
    return ""


def _listed(results: Iterable[Any]) -> list[Any]:
    values: list[Any] = []
    for result in results:
        values += result.tolist() if isinstance(result, torch.Tensor) else [result]
    return values


def _numbers(ctx: Context, rank: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return the data of a rank: distinct numbers, whose sums are exact in float32 on up to 4,000 ranks."""
    return (torch.arange(_COUNT, device=ctx.device) % 8 + rank % 64 + 1).to(dtype)


def _all_numbers(ctx: Context) -> list[torch.Tensor]:
    return [_numbers(ctx, rank) for rank in range(ctx.world_size)]


def _sums(ctx: Context) -> list[int]:
    of_ranks = sum(rank % 64 + 1 for rank in range(ctx.world_size))
    return [of_ranks + ctx.world_size * (place % 8) for place in range(_COUNT)]


def _empty(ctx: Context, count: int = _COUNT) -> torch.Tensor:
    return torch.full((count,), -1, dtype=torch.int64, device=ctx.device)


def _all_reduce(ctx: Context, dtype: torch.dtype) -> Case:
    mine = _numbers(ctx, ctx.rank, dtype)
    return Case(lambda: distributed.all_reduce(mine), [mine], _sums(ctx))


def _broadcast(ctx: Context, source: int) -> Case:
    mine = _numbers(ctx, source) if ctx.rank == source else _empty(ctx)
    return Case(lambda: distributed.broadcast(mine, source), [mine], _listed([_numbers(ctx, source)]))


def _all_gather(ctx: Context) -> Case:
    mine, parts = _numbers(ctx, ctx.rank), [_empty(ctx) for _ in range(ctx.world_size)]
    return Case(lambda: distributed.all_gather(parts, mine), parts, _listed(_all_numbers(ctx)))


def _reduce_scatter(ctx: Context) -> Case:
    """Each rank adds the destination rank to its numbers."""
    mine, out = _numbers(ctx, ctx.rank), _empty(ctx)
    parts = [mine + target for target in range(ctx.world_size)]
    expected = [total + ctx.rank * ctx.world_size for total in _sums(ctx)]
    return Case(lambda: distributed.reduce_scatter(out, parts), [out], expected)


def _all_to_all(ctx: Context) -> Case:
    """Rank ``r`` sends ``1000 r + s`` to rank ``s``."""
    mine = torch.arange(ctx.world_size, device=ctx.device) + 1000 * ctx.rank
    out = _empty(ctx, ctx.world_size)
    expected = [1000 * rank + ctx.rank for rank in range(ctx.world_size)]
    return Case(lambda: distributed.all_to_all_single(out, mine), [out], expected)


def _gather(ctx: Context) -> Case:
    mine = _numbers(ctx, ctx.rank)
    if not ctx.is_main:
        return Case(lambda: distributed.gather(mine, None, dst=0), [], [])
    parts = [_empty(ctx) for _ in range(ctx.world_size)]
    return Case(lambda: distributed.gather(mine, parts, dst=0), parts, _listed(_all_numbers(ctx)))


def _scatter(ctx: Context) -> Case:
    parts, out = _all_numbers(ctx) if ctx.is_main else None, _empty(ctx)
    return Case(lambda: distributed.scatter(out, parts, src=0), [out], _listed([_numbers(ctx, ctx.rank)]))


def _ring(ctx: Context) -> Case:
    """Each rank sends to the next one, and the last one to the first."""
    before, after = (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size
    mine, out = _numbers(ctx, ctx.rank), _empty(ctx)
    both = [distributed.P2POp(distributed.isend, mine, after), distributed.P2POp(distributed.irecv, out, before)]
    return Case(partial(exchange, both), [out], _listed([_numbers(ctx, before)]))


def _barrier(ctx: Context) -> Case:
    """No rank may leave before all have arrived, which they count in the store."""
    arrived: list[int] = []
    store = ctx._store
    assert store is not None
    number = store.add(f"trial/barrier/{ctx.rank}", 1)  # The repeats of this rank.

    def run() -> None:
        store.add(f"trial/barrier/came/{number}", 1)
        distributed.barrier()
        arrived.append(store.add(f"trial/barrier/came/{number}", 0))

    return Case(run, arrived, [ctx.world_size])


def _all_gather_object(ctx: Context) -> Case:
    out: list[Any] = [None] * ctx.world_size
    expected = [{"rank": rank} for rank in range(ctx.world_size)]
    return Case(lambda: distributed.all_gather_object(out, {"rank": ctx.rank}), out, expected)


# --- bandwidth, in bytes per second ---

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
    return median(timed(ctx.device, operation) for _ in range(repeats))


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
                    yield _send_to(ctx, target)
                elif ctx.rank == target:
                    _receive_from(ctx, source)
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


def _send_to(ctx: Context, target: int) -> Link:
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


def _receive_from(ctx: Context, source: int) -> None:
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
