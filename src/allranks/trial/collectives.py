"""Collective operations on numbers whose result is known exactly, each tried some times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from allranks.runs.trial import Begun, Collective, Told

if TYPE_CHECKING:
    from allranks.runtime.context import Context

#: Numbers that each rank brings: few, so that time is that of the way and not of the bytes.
_COUNT = 64
#: Words in what torch says of an operation that a backend does not have.
_LACKING = ("not support", "unsupported", "not implemented", "no support")


class Attempt(NamedTuple):
    """An operation on data of its own: doing it, what came of it as plain lists, and what must come of it."""

    run: Callable[[], object]
    got: Callable[[], list[Any]]
    expected: list[Any]


Make = Callable[["Context"], Attempt]


def all_cases(world_size: int) -> dict[str, Make]:
    """Return all operations by name."""
    last = world_size - 1
    ends = {0: "broadcast from rank 0", last: f"broadcast from rank {last}"}
    return {
        "all_reduce int64": partial(_all_reduce, dtype=torch.int64),
        "all_reduce float32": partial(_all_reduce, dtype=torch.float32),
        **{name: partial(_broadcast, source=source) for source, name in ends.items()},
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
        "gather": _gather,
        "scatter": _scatter,
        "send and receive": _around,
        "barrier": _barrier,
        "all_gather_object": _all_gather_object,
    }


def try_all(ctx: Context, repeats: int) -> Iterator[Told]:
    """Try each operation once and ``repeats`` times more; all ranks call it."""
    for name, make in all_cases(ctx.world_size).items():
        yield Begun(ctx.rank, name)
        yield _tried(ctx, name, make, repeats)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tried(ctx: Context, name: str, make: Make, repeats: int) -> Collective:
    if name == "send and receive" and ctx.world_size == 1:
        return Collective(ctx.rank, name, why_not="one rank has no neighbour")
    wrong, times = "", []
    try:
        for _ in range(1 + repeats):  # The first one opens connections: it is not timed.
            seconds, found = _once(ctx, make(ctx))
            times.append(seconds)
            wrong = wrong or found
    except (RuntimeError, NotImplementedError) as error:
        if not any(word in str(error).lower() for word in _LACKING):
            raise
        return Collective(ctx.rank, name, why_not=str(error).splitlines()[0])
    return Collective(ctx.rank, name, wrong, median(times[1:]))


def _once(ctx: Context, attempt: Attempt) -> tuple[float, str]:
    """Do an operation; return the seconds that it took, and what is wrong about the result."""
    synchronize(ctx.device)
    began = time.perf_counter()
    attempt.run()
    synchronize(ctx.device)
    return time.perf_counter() - began, difference(attempt.got(), attempt.expected)


def difference(got: list[Any], expected: list[Any]) -> str:
    """Say where two lists differ first; empty: nowhere."""
    for place, (one, other) in enumerate(zip(got, expected, strict=True)):
        if one != other:
            return f"number {place} must be {other}, and is {one}"
    return ""


def _numbers(ctx: Context, rank: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Give what a rank brings: other numbers at each place, and sums that float32 holds exactly on 4,000 ranks."""
    return (torch.arange(_COUNT, device=ctx.device) % 8 + _of(rank)).to(dtype)


def _of(rank: int) -> int:
    return rank % 64 + 1


def _listed(*tensors: torch.Tensor) -> list[Any]:
    return [number for tensor in tensors for number in tensor.tolist()]


def _empty(ctx: Context, count: int = _COUNT) -> torch.Tensor:
    return torch.full((count,), -1, dtype=torch.int64, device=ctx.device)


def _of_all(ctx: Context) -> list[torch.Tensor]:
    return [_numbers(ctx, rank) for rank in range(ctx.world_size)]


def _sums(ctx: Context) -> list[int]:
    of_ranks = sum(map(_of, range(ctx.world_size)))
    return [of_ranks + ctx.world_size * (place % 8) for place in range(_COUNT)]


def _all_reduce(ctx: Context, dtype: torch.dtype) -> Attempt:
    mine = _numbers(ctx, ctx.rank, dtype)
    return Attempt(lambda: distributed.all_reduce(mine), lambda: _listed(mine), _sums(ctx))


def _broadcast(ctx: Context, source: int) -> Attempt:
    mine = _numbers(ctx, source) if ctx.rank == source else _empty(ctx)
    expected = _listed(_numbers(ctx, source))
    return Attempt(lambda: distributed.broadcast(mine, source), lambda: _listed(mine), expected)


def _all_gather(ctx: Context) -> Attempt:
    mine, parts = _numbers(ctx, ctx.rank), [_empty(ctx) for _ in range(ctx.world_size)]
    return Attempt(lambda: distributed.all_gather(parts, mine), lambda: _listed(*parts), _listed(*_of_all(ctx)))


def _reduce_scatter(ctx: Context) -> Attempt:
    """Rank ``r`` brings its numbers, and the place that they are for added to them."""
    mine, out = _numbers(ctx, ctx.rank), _empty(ctx)
    parts = [mine + place for place in range(ctx.world_size)]
    expected = [total + ctx.rank * ctx.world_size for total in _sums(ctx)]
    return Attempt(lambda: distributed.reduce_scatter(out, parts), lambda: _listed(out), expected)


def _all_to_all(ctx: Context) -> Attempt:
    """Rank ``r`` sends ``1000 r + s`` to rank ``s``."""
    mine = torch.arange(ctx.world_size, device=ctx.device) + 1000 * ctx.rank
    out = _empty(ctx, ctx.world_size)
    expected = [1000 * rank + ctx.rank for rank in range(ctx.world_size)]
    return Attempt(lambda: distributed.all_to_all_single(out, mine), lambda: _listed(out), expected)


def _gather(ctx: Context) -> Attempt:
    parts = [_empty(ctx) for _ in range(ctx.world_size)] if ctx.is_main else []
    mine, expected = _numbers(ctx, ctx.rank), _listed(*_of_all(ctx)) if ctx.is_main else []
    return Attempt(lambda: distributed.gather(mine, parts or None, dst=0), lambda: _listed(*parts), expected)


def _scatter(ctx: Context) -> Attempt:
    parts, out = _of_all(ctx) if ctx.is_main else None, _empty(ctx)
    return Attempt(
        lambda: distributed.scatter(out, parts, src=0), lambda: _listed(out), _listed(_numbers(ctx, ctx.rank))
    )


def _around(ctx: Context) -> Attempt:
    """Each rank sends to the next one, the last one to the first."""
    before, after = (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size
    mine, out = _numbers(ctx, ctx.rank), _empty(ctx)
    both = [distributed.P2POp(distributed.isend, mine, after), distributed.P2POp(distributed.irecv, out, before)]

    def run() -> None:
        for work in distributed.batch_isend_irecv(both):
            work.wait()

    return Attempt(run, lambda: _listed(out), _listed(_numbers(ctx, before)))


def _barrier(ctx: Context) -> Attempt:
    """Nobody may leave it before all have come; a store that needs no collective operation knows who has."""
    came: list[int] = []
    store = ctx._store
    assert store is not None
    number = store.add(f"trial/barrier/{ctx.rank}", 1)  # The repeats of this rank.

    def run() -> None:
        store.add(f"trial/barrier/came/{number}", 1)
        distributed.barrier()
        came.append(store.add(f"trial/barrier/came/{number}", 0))

    return Attempt(run, lambda: came, [ctx.world_size])


def _all_gather_object(ctx: Context) -> Attempt:
    out: list[Any] = [None] * ctx.world_size
    expected = [{"rank": rank} for rank in range(ctx.world_size)]
    return Attempt(lambda: distributed.all_gather_object(out, {"rank": ctx.rank}), lambda: out, expected)
