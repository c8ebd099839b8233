"""Data loading: which rank gets which samples, when, and how they are fetched.

``fetch`` and ``workers`` get samples; ``mapped`` and ``stream`` define and make the batches; ``loader`` is what a
script iterates. This module checks the arguments and makes the loader.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from allranks.errors import RankError
from allranks.runtime.call_errors import is_whole, positive
from allranks.runtime.data import workers as processes
from allranks.runtime.data.fetch import Collate, Fetching, choose, move, pin
from allranks.runtime.data.loader import EvaluationLoader, Loader
from allranks.runtime.data.mapped import BatchSource, MapSource, Order, Share, Split, batch_sizes
from allranks.runtime.data.randomness import Seeding
from allranks.runtime.data.stream import ShardedSource, StreamSource, cut, no_full_batch, too_few
from allranks.runtime.data.workers import Pool

if TYPE_CHECKING:
    from allranks.runtime.context import Context

__all__ = ["EvaluationLoader", "Loader", "LoaderOptions", "make_evaluation_loader", "make_loader"]

Kind = Literal["map", "stream"]


@dataclass(frozen=True)
class LoaderOptions:
    """Options of loaders for training and for evaluation; see ``Context.loader``."""

    seed: int
    workers: int | Literal["auto"]
    pin_memory: bool | None
    prefetch: int
    collate_fn: Collate | None
    worker_init_fn: Callable[[int], None] | None
    fetch: Fetching


#: Number of CPUs of this rank, by process id: the first loader computes it together with the other ranks.
_cpus: dict[int, int] = {}


def make_loader(
    ctx: Context,
    dataset: Any,
    *,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    workers: int | Literal["auto"] = "auto",
    pin_memory: bool | None = None,
    prefetch: int = 2,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    drop_last: bool = False,
    fetch: Literal["auto", "item"] = "auto",
    sharded: bool = False,
    quiet: bool = False,
) -> Loader:
    """Return a loader for training: it yields this rank's part of each batch, on this rank's device.

    All ranks call it with the whole dataset. The order of samples depends only on seed, epoch and the length of the
    dataset, and the position is counted in samples. So each sample comes exactly once in an epoch (unless
    ``drop_last`` drops it), with any number of ranks and workers, and however often the training is stopped and
    resumed, even on another number of ranks. If the last batch of an epoch has fewer samples than there are ranks,
    some ranks get one sample as a filler: ``ctx.progress.samples`` is 0 then, and ``ctx.backward`` and
    ``ctx.metrics`` ignore it.

    Random numbers that ``dataset[i]`` draws from ``random``, ``numpy.random`` or torch's default CPU generator
    depend only on seed, epoch and ``i``, and do not change the training's own. The first batch that draws some is
    fetched twice.

    Each rank reads a stream (a torch ``IterableDataset``, or anything with only ``__iter__``) completely; the same
    guarantees hold if the stream is the same each time. It is not shuffled.

    Args:
        dataset: anything with ``__getitem__`` and ``__len__``, or a stream.
        batch_size: number of samples in a batch on each rank.
        global_batch_size: number of samples in a batch over all ranks; give this or ``batch_size``.
        shuffle: False keeps the dataset's order.
        seed: seed of order and augmentation; default: the context's, else 0.
        workers: number of processes on each rank that fetch batches; with 0 the rank itself does. ``"auto"``: the
            number of CPUs that the rank has for itself, minus one; at most one for a stream; none for a
            ``TensorDataset`` and for a dataset that fetches lists of samples (``__getitems__``).
        pin_memory: copy batches to the GPU through pinned memory; default: if the device is a GPU.
        prefetch: number of batches that each worker keeps ready.
        collate_fn: makes a batch of a list of samples; default: torch's ``default_collate``.
        worker_init_fn: called in each worker with its number.
        drop_last: drop the samples at the end of an epoch that do not fill a batch.
        fetch: ``"item"`` calls ``dataset[i]`` for each sample, even if the dataset can fetch lists of samples,
            whose random numbers are seeded once per list.
        sharded: for streams: the dataset yields each rank a part of its own. The epoch ends on all ranks when the
            first rank has no more samples; the ranks agree on that in each step, and a resume skips as many
            batches.
        quiet: do not print the batch size.

    Raises:
        RankError: the dataset is empty or has fewer samples than there are ranks; the global batch size is not
            divisible by the number of ranks; the ranks disagree on any of this; or a value is invalid.
    """
    seed = (ctx.seed or 0) if seed is None else seed
    options = LoaderOptions(seed, workers, pin_memory, prefetch, collate_fn, worker_init_fn, fetch)
    kind = _check(dataset, options, sharded=sharded)
    size = batch_sizes(batch_size, global_batch_size, ctx.world_size)
    samples = len(dataset) if kind == "map" else None
    shuffled = shuffle and kind == "map"
    facts = {
        "samples": samples,
        "global_batch_size": size.total,
        "shuffle": shuffled,
        "seed": seed,
        "drop_last": drop_last,
    }
    gathered = ctx.control.gather((facts, ctx.node_rank, processes.allowed_cpus()))
    _check_same([theirs for theirs, _, _ in gathered])
    _cpus[os.getpid()] = processes.cpus_of(ctx.rank, [(node, cpus) for _, node, cpus in gathered])
    say: Callable[[str], None] = (lambda _: None) if quiet else ctx.print
    share = Share(ctx.rank, ctx.world_size, filler=True)
    source: BatchSource
    if samples is not None:
        _check_enough(samples, ctx.world_size)
        if drop_last and samples < size.total:
            raise no_full_batch("dataset", samples, size.total)
        split = Split(samples, size.total, drop_last)
        source = _map_source(ctx, dataset, Order(samples, seed, shuffle=shuffle), split, share, options)
    elif sharded:
        source = ShardedSource(ctx, dataset, size, options, _pool(ctx, options, 1), say=say, drop_last=drop_last)
    else:
        own = partial(cut, size=size.total, share=share, drop_last=drop_last)
        source = StreamSource(dataset, own, options, _pool(ctx, options, 1))
    loader = Loader(
        dataset,
        source,
        size,
        ctx.progress,
        {"kind": "sharded" if sharded else kind, "length": samples, "seed": seed, "shuffle": shuffled},
        world_size=ctx.world_size,
        length=split.count_and_last()[0] if samples is not None else None,
        say=say,
    )
    ctx.closing.append(processes.close_pools)
    steps = f", {len(loader)} batches an epoch" if samples is not None else ""
    workers = source.pool.workers
    helped = f", {workers} worker{'s' * (workers != 1)} a rank" if workers else ""
    say(f"batch: {size.words(ctx.world_size)}{steps}{helped}")
    return loader


def make_evaluation_loader(
    ctx: Context,
    dataset: Any,
    *,
    batch_size: int,
    seed: int | None = None,
    workers: int | Literal["auto"] = "auto",
    pin_memory: bool | None = None,
    prefetch: int = 2,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    fetch: Literal["auto", "item"] = "auto",
    same_steps: bool = True,
    whole: bool = False,
) -> EvaluationLoader:
    """Return a loader for evaluation: every sample exactly once over all ranks, in the dataset's order.

    No sample is repeated for padding, and all ranks have the same number of batches, so models that communicate in
    their forward pass can be evaluated too. Batches at the end may be smaller, or larger by one sample. While the
    loader is iterated, ``ctx.progress`` describes its batches, and afterwards the training's again. Random numbers
    are the same in each evaluation.

    Args:
        dataset: as for :meth:`loader`.
        batch_size: number of samples in a batch on each rank.
        seed: seed of random numbers that the dataset draws; default: the context's, else 0.
        workers: as for :meth:`loader`.
        pin_memory: as for :meth:`loader`.
        prefetch: as for :meth:`loader`.
        collate_fn: as for :meth:`loader`.
        worker_init_fn: as for :meth:`loader`.
        fetch: as for :meth:`loader`.
        same_steps: False lets some ranks have one batch less than others, as needed with fewer samples than ranks.
        whole: this rank gets all samples, for an evaluation on one rank alone.

    Raises:
        RankError: the dataset is empty, or has fewer samples than there are ranks.
    """
    seed = (ctx.seed or 0) if seed is None else seed
    options = LoaderOptions(seed, workers, pin_memory, prefetch, collate_fn, worker_init_fn, fetch)
    kind = _check(dataset, options, sharded=False)
    share = Share(0, 1, filler=False) if whole else Share(ctx.rank, ctx.world_size, filler=False)
    total = positive("batch_size", batch_size) * share.world_size
    length = None
    source: BatchSource
    if kind == "stream":
        own = partial(cut, size=total, share=share, even=same_steps)
        source = StreamSource(dataset, own, options, _pool(ctx, options, 1))
    else:
        samples = len(dataset)
        _check_enough(samples, share.world_size if same_steps else 1)
        split = Split(samples, total, even_over=share.world_size if same_steps else 0)
        source = _map_source(ctx, dataset, Order(samples, options.seed, shuffle=False), split, share, options)
        length = sum(share.rank < stop - start for start, stop in split.batches())
    loader = EvaluationLoader(dataset, source, batch_size, ctx.progress, length)
    ctx.closing.append(processes.close_pools)
    return loader


def _map_source(
    ctx: Context, dataset: Any, order: Order, split: Split, share: Share, options: LoaderOptions
) -> MapSource:
    fetch = choose(dataset, Seeding(options.seed), options.collate_fn, options.fetch)
    pool = _pool(ctx, options, 0 if fetch.in_memory else split.count_and_last()[0] - 1)
    return MapSource(order, split, share, fetch, pool)


def _pool(ctx: Context, options: LoaderOptions, most: int) -> Pool:
    """Return the pool of a loader with at most ``most`` workers."""
    # An evaluation loader does not wait for the other ranks to divide the CPUs.
    cpus = _cpus.get(os.getpid(), max(1, len(processes.allowed_cpus()) // ctx.local_world_size))
    count = min(cpus - 1, most) if options.workers == "auto" else options.workers
    on_gpu = ctx.device.type == "cuda"
    pinned = torch.cuda.is_available() and (on_gpu if options.pin_memory is None else options.pin_memory)

    def finish(batch: Any) -> Any:
        if pinned and not count:  # torch pins the batches of workers.
            batch = pin(batch)
        return batch if ctx.device.type == "cpu" else move(batch, ctx.device, pinned=pinned)

    return Pool(count, options.prefetch, pinned, finish, options.worker_init_fn)


def _check(dataset: Any, options: LoaderOptions, *, sharded: bool) -> Kind:
    """Check the options, also against the kind of dataset; return the kind."""
    workers, prefetch, seed, fetch = options.workers, options.prefetch, options.seed, options.fetch
    if workers != "auto" and not is_whole(workers, 0):
        raise RankError(f"invalid number of processes: workers={workers!r}", fix='give "auto" or a number from 0 on')
    if not is_whole(prefetch, 1):
        raise RankError(f"invalid number of batches: prefetch={prefetch!r}", fix="give a number from 1 on")
    if not is_whole(seed, None):
        raise RankError(f"invalid seed: seed={seed!r}", fix="give a whole number")
    kind = _kind_of(dataset)
    if sharded and kind == "map":
        raise RankError(
            "sharded=True with a dataset whose samples have numbers",
            why="the loader gives each rank its part of such a dataset",
            fix="give every rank the whole dataset, without sharded=True",
        )
    if kind == "stream" and not sharded and isinstance(workers, int) and workers > 1:
        raise RankError(
            f"workers={workers} for a stream",
            why="each worker would read the complete stream",
            fix="workers=1, or sharded=True if the dataset divides itself among ranks and workers",
        )
    if fetch not in ("auto", "item"):
        raise RankError(f"invalid way to fetch: fetch={fetch!r}", fix='fetch="auto" or fetch="item"')
    return kind


def _kind_of(dataset: Any) -> Kind:
    """Return ``map`` if samples can be indexed, ``stream`` if they can only be iterated."""
    if isinstance(dataset, DataLoader):
        raise RankError(
            "the loader got a DataLoader, not a dataset",
            why="its batches would count as samples, and each rank would get all of them",
            fix=f"ctx.loader(dataset, batch_size={dataset.batch_size or 64}), with the DataLoader's own dataset",
        )
    if isinstance(dataset, IterableDataset):
        return "stream"
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return "map"
    name = type(dataset).__name__
    if hasattr(dataset, "__next__"):
        raise RankError(
            f"the dataset, a {name}, can be iterated only once",
            why="each epoch iterates it again, and so does a resume",
            fix="give an object whose __iter__() starts from the beginning, such as a torch IterableDataset",
        )
    if hasattr(dataset, "__iter__"):
        return "stream"
    raise RankError(
        f"the loader got {name}, which is not a dataset",
        why="a dataset has __getitem__ and __len__, or __iter__",
        fix="give a torch Dataset, a list or an IterableDataset; a DataLoader is not needed here",
    )


def _check_same(facts: Sequence[dict[str, Any]]) -> None:
    """Check that all ranks agree with rank 0."""
    for rank, theirs in enumerate(facts):
        for name, here in facts[0].items():
            if here != theirs[name]:
                raise RankError(
                    f"the ranks disagree on their data: {name} is {theirs[name]} on rank {rank} and {here} on rank 0",
                    why="all ranks must make the same steps, and divide the same samples among them",
                    fix="make the same dataset and loader on all ranks; the loader gives each rank its part",
                )


def _check_enough(length: int, world_size: int) -> None:
    """Check that there is a sample for each rank."""
    if length == 0:
        raise RankError(
            "the dataset is empty",
            why="its length is 0",
            fix="check that the directory or filter that it is made from finds files on this node",
        )
    if length < world_size:
        raise too_few(length, world_size)
