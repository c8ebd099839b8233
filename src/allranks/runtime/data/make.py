"""Puts loaders together from what a script asks for."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from allranks.runtime import batch
from allranks.runtime.data import checks
from allranks.runtime.data import workers as processes
from allranks.runtime.data.evaluation import EvaluationLoader, Even
from allranks.runtime.data.fetch import Collate, Fetching, choose
from allranks.runtime.data.loader import Loader
from allranks.runtime.data.mapped import Cuts, Handling, MapSource, Share, Source
from allranks.runtime.data.move import mover, pin
from allranks.runtime.data.order import Order, Split, even_batches, part
from allranks.runtime.data.randomness import Seeding
from allranks.runtime.data.sharded import ShardedSource
from allranks.runtime.data.stream import Rule, StreamSource

if TYPE_CHECKING:
    from allranks.runtime.reader import Reader

#: CPUs that this rank has for itself, by process id: found out together with the other ranks by the first loader.
_cpus: dict[int, int] = {}


@dataclass(frozen=True)
class Options:
    """What loaders for training and for evaluation have in common; see ``Context.loader``."""

    seed: int
    workers: int | Literal["auto"]
    pin_memory: bool | None
    prefetch: int
    collate_fn: Collate | None
    worker_init_fn: Callable[[int], None] | None
    fetch: Fetching


def make_loader(
    ctx: Reader,
    dataset: Any,
    *,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    workers: int | Literal["auto"] = "auto",
    pin_memory: bool | None = None,
    prefetch: int = 2,
    collate_fn: Collate | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    drop_last: bool = False,
    fetch: Fetching = "auto",
    sharded: bool = False,
    quiet: bool = False,
) -> Loader:
    """Make what ``Context.loader`` gives; see there. All ranks must call it.

    Raises:
        RankError: something cannot work; it says what and why.
    """
    chosen = (ctx.seed or 0) if seed is None else seed
    options = Options(chosen, workers, pin_memory, prefetch, collate_fn, worker_init_fn, fetch)
    kind = _checked(dataset, options, sharded=sharded)
    size = batch.resolve(batch_size, global_batch_size, ctx.world_size)
    samples = len(dataset) if kind == "map" else None
    shuffled = shuffle and kind == "map"
    _meet(ctx, checks.Facts(samples, size.total, shuffled, chosen, drop_last, ctx.node_rank, processes.allowed_cpus()))
    say = _silent if quiet else ctx.print
    source: Source
    if samples is not None:
        checks.check_enough(samples, ctx.world_size)
        if drop_last:
            checks.check_fills(samples, size.total)
        cuts = Split(samples, size.total, drop_last)
        share = Share(ctx.rank, ctx.world_size, filler=True)
        source, handling = _map_source(ctx, dataset, Order(samples, chosen, shuffle=shuffle), cuts, share, options)
    elif sharded:
        source, handling = _sharded_source(ctx, dataset, size, options, say, drop_last=drop_last)
    else:
        rule = Rule(size.total, Share(ctx.rank, ctx.world_size, filler=True), drop_last=drop_last)
        source, handling = _stream_source(ctx, dataset, rule, options)
    loader = Loader(
        dataset,
        source,
        size,
        ctx.progress,
        {"kind": "sharded" if sharded else kind, "length": samples, "seed": chosen, "shuffle": shuffled},
        world_size=ctx.world_size,
        count=cuts.count if samples is not None else None,
        say=say,
    )
    _close_with(ctx, loader)
    steps = f", {len(loader)} batches an epoch" if samples is not None else ""
    helped = f", {handling.workers} worker{'s' * (handling.workers != 1)} a rank" if handling.workers else ""
    say(f"batch: {size.words(ctx.world_size)}{steps}{helped}")
    return loader


def make_evaluation_loader(
    ctx: Reader,
    dataset: Any,
    *,
    batch_size: int,
    seed: int | None = None,
    workers: int | Literal["auto"] = "auto",
    pin_memory: bool | None = None,
    prefetch: int = 2,
    collate_fn: Collate | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    fetch: Fetching = "auto",
    same_steps: bool = True,
    whole: bool = False,
) -> EvaluationLoader:
    """Make what ``Context.evaluation_loader`` gives; see there. It needs no other rank.

    Raises:
        RankError: something cannot work; it says what and why.
    """
    chosen = (ctx.seed or 0) if seed is None else seed
    options = Options(chosen, workers, pin_memory, prefetch, collate_fn, worker_init_fn, fetch)
    kind = _checked(dataset, options, sharded=False)
    share = Share(0, 1, filler=False) if whole else Share(ctx.rank, ctx.world_size, filler=False)
    total = batch.positive("batch_size", batch_size) * share.world_size
    source: Source
    if kind == "stream":
        rule = Rule(total, share, even=same_steps)
        source, _ = _stream_source(ctx, dataset, rule, options)
        count = None
    else:
        cuts = Even(_cuts(checks.length_of(dataset), total, share.world_size, same_steps=same_steps))
        source, _ = _map_source(ctx, dataset, Order(len(dataset), chosen, shuffle=False), cuts, share, options)
        count = _counter(cuts, share)
    loader = EvaluationLoader(dataset, source, batch_size, ctx.progress, count)
    _close_with(ctx, loader)
    return loader


def _checked(dataset: Any, options: Options, *, sharded: bool) -> checks.Kind:
    checks.check_numbers(options.workers, options.prefetch, options.seed)
    kind = checks.kind_of(dataset)
    checks.check_stream(kind, options.workers, sharded=sharded, fetch=options.fetch)
    return kind


def _meet(ctx: Reader, mine: checks.Facts) -> None:
    """Compare with the other ranks, and work out which CPUs are whose."""
    facts = ctx.control.gather(mine)
    checks.check_alike(facts)
    _cpus[os.getpid()] = processes.cpus_of(ctx.rank, [(one.node, one.cpus) for one in facts])


def _cpus_for(ctx: Reader) -> int:
    """Give the CPUs of this rank, without asking the others."""
    alone = max(1, len(processes.allowed_cpus()) // ctx.local_world_size)
    return _cpus.get(os.getpid(), alone)


def _handling(ctx: Reader, options: Options, most: int) -> Handling:
    """Say how batches are handled; ``most`` is the greatest number of workers that makes sense."""
    import torch

    count = min(_cpus_for(ctx) - 1, most) if options.workers == "auto" else options.workers
    on_gpu = ctx.device.type == "cuda"
    pinned = torch.cuda.is_available() and (on_gpu if options.pin_memory is None else options.pin_memory)
    return Handling(count, options.prefetch, pinned, options.worker_init_fn)


def _finisher(ctx: Reader, handling: Handling) -> Callable[[Any], Any]:
    """Give what is done with a batch in the rank itself; workers' batches are pinned by torch."""
    move = mover(ctx.device, pinned=handling.pinned)
    if handling.pinned and not handling.workers:
        return (lambda one: move(pin(one))) if move is not None else pin
    return move if move is not None else _same


def _map_source(
    ctx: Reader, dataset: Any, order: Order, cuts: Cuts, share: Share, options: Options
) -> tuple[MapSource, Handling]:
    fetch = choose(dataset, Seeding(options.seed), options.collate_fn, options.fetch)
    handling = _handling(ctx, options, 0 if fetch.in_memory else cuts.count(0) - 1)
    return MapSource(order, cuts, share, fetch, handling, _finisher(ctx, handling)), handling


def _stream_source(ctx: Reader, dataset: Any, rule: Rule, options: Options) -> tuple[StreamSource, Handling]:
    handling = _handling(ctx, options, 1)
    finish = _finisher(ctx, handling)
    return StreamSource(dataset, rule, options.collate_fn, handling, options.seed, finish), handling


def _sharded_source(
    ctx: Reader,
    dataset: Any,
    size: batch.BatchSize,
    options: Options,
    say: Callable[[str], None],
    *,
    drop_last: bool,
) -> tuple[ShardedSource, Handling]:
    handling = _handling(ctx, options, 1)
    source = ShardedSource(
        dataset,
        size,
        options.collate_fn,
        handling,
        seed=options.seed,
        control=ctx.control,
        rank=ctx.rank,
        world_size=ctx.world_size,
        finish=_finisher(ctx, handling),
        say=say,
        drop_last=drop_last,
    )
    return source, handling


def _cuts(length: int, total: int, world_size: int, *, same_steps: bool) -> list[tuple[int, int]]:
    if not same_steps:
        return list(Split(length, total).batches())
    checks.check_enough(length, world_size)
    return even_batches(length, total, world_size)


def _counter(cuts: Even, share: Share) -> Callable[[], int]:
    def count() -> int:
        parts = (part(start, stop, share.rank, share.world_size) for start, stop in cuts.cuts)
        return sum(begin < end for begin, end in parts)

    return count


def _close_with(ctx: Reader, loader: Loader | EvaluationLoader) -> None:
    """End the workers when the context is closed, and keep the loader alive for that no longer than the script does."""
    weak = weakref.ref(loader)

    def close() -> None:
        there = weak()
        if there is not None:
            there.close()

    ctx.closing.append(close)


def _same(one: Any) -> Any:
    return one


def _silent(*values: object) -> None:
    """Say nothing."""
