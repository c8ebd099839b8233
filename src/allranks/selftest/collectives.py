"""Collective operations on data with exactly known results, each run several times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from allranks.record.selftest import Collective, OperationStarted, SelfTestReport

if TYPE_CHECKING:
    from allranks.runtime.context import Context

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
            synchronize(ctx.device)
            began = time.perf_counter()
            case.run()
            synchronize(ctx.device)
            times.append(time.perf_counter() - began)
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

    def run() -> None:
        for work in distributed.batch_isend_irecv(both):
            work.wait()

    return Case(run, [out], _listed([_numbers(ctx, before)]))


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
