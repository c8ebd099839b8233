"""Batches of a dataset that can only be iterated (``IterableDataset``).

Each rank reads the complete stream and keeps its samples (:class:`StreamSource`): global batches are the same for every
world size, and a resume skips the samples that are done. That is exact if the stream is the same each time. Or the
dataset gives each rank its own part, of unknown length (:class:`ShardedSource`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from allranks.errors import RankError
from allranks.runtime.data.fetch import Collate
from allranks.runtime.data.mapped import BatchSize, Delivery, Share
from allranks.runtime.data.randomness import apart
from allranks.runtime.data.workers import Pool

if TYPE_CHECKING:
    from allranks.runtime.context import Context
    from allranks.runtime.data import LoaderOptions


class Kept(NamedTuple):
    """A rank's part of a global batch: batch, samples that count, samples over all ranks, whether it is the last."""

    samples: Any
    counted: int
    total: int
    is_last: bool


def cut(
    samples: Iterable[Any],
    size: int,
    share: Share,
    *,
    skip: int = 0,
    drop_last: bool = False,
    even: bool = False,
    collate: Collate = list,
) -> Iterator[Kept]:
    """Yield a rank's part of each global batch: sample ``k`` of a batch goes to rank ``k mod world size``.

    Args:
        samples: the stream.
        size: samples of a global batch.
        share: which of them are this rank's.
        skip: samples that are done already.
        drop_last: leave out what does not fill a batch at the end.
        even: the last batch takes in what is left when that is too little for all ranks.
        collate: makes a batch of a list of samples.
    """
    stream = iter(samples)
    done = sum(1 for _ in islice(stream, skip))
    rank, world_size = share.rank, share.world_size
    # Look ahead: only the following samples show whether a batch is the last.
    need = world_size if even else 1
    if drop_last:
        need = size
    ahead = list(islice(stream, need))
    _check(done, skip, len(ahead), size if drop_last else 1)
    while ahead and not (drop_last and len(ahead) < need):
        first, mine, total = ahead[0], [], 0
        for sample in chain(ahead, islice(stream, size - len(ahead))):
            if total % world_size == rank:
                mine.append(sample)
            total += 1
        ahead = list(islice(stream, need))
        if even and len(ahead) < need:
            mine += ahead[(rank - total) % world_size :: world_size]
            total += len(ahead)
            ahead = []
        done += total
        is_last = not ahead or (drop_last and len(ahead) < need)
        if is_last and done < world_size and (share.filler or even):
            raise too_few(done, world_size)
        if mine or share.filler:
            yield Kept(collate(mine or [first]), len(mine), total, is_last)


def _check(skipped: int, skip: int, following: int, least: int) -> None:
    if skipped < skip:
        raise RankError(
            f"the stream ended after {skipped} samples, but {skip} of this epoch are done already",
            why="it is not the stream that the checkpoint was taken with",
            fix="give the same stream, or load the checkpoint without the loader",
        )
    if not following and not skip:
        raise RankError("the dataset is empty", why="the stream ended before its first sample")
    if following < least and not skip:
        raise no_full_batch("stream", following, least)


def too_few(samples: int, world_size: int) -> RankError:
    """Return the error for a dataset with fewer samples than ranks."""
    return RankError(
        f"the dataset has {samples} sample{'s' * (samples != 1)}, fewer than there are ranks ({world_size})",
        why="every rank needs one at least",
        fix=f"use {samples} rank{'s' * (samples != 1)} or fewer, or more data",
    )


def no_full_batch(what: str, samples: int, batch: int) -> RankError:
    """Return the error for a dataset or stream that does not fill one batch with ``drop_last``."""
    return RankError(
        f"the {what} has {samples} samples, and a batch takes {batch}",
        why="drop_last=True leaves out what does not fill a batch",
        fix="use smaller batches, or drop_last=False",
    )


@dataclass(eq=False)
class Pass(IterableDataset[Any]):
    """One pass over a stream, in a worker or the rank; its random numbers are separate from the training's.

    The dataset's ``set_epoch`` is called before, if it exists.

    Attributes:
        dataset: gives the stream again with each ``iter()``.
        epoch: of the pass.
        cut: makes whole batches of the stream's samples.
        name: from which the generators are seeded when the stream starts; ``{}`` stands for the worker's number.
    """

    dataset: Any
    epoch: int
    cut: Callable[[Iterable[Any]], Iterator[Any]]
    name: str

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return apart(self._read, self.name.format(worker.id if worker else 0))

    def _read(self) -> Iterator[Any]:
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)
        yield from self.cut(self.dataset)


@dataclass
class StreamSource:
    """Batches of a stream that every rank reads completely; the generators are seeded alike on all ranks.

    ``cut`` is :func:`cut` with the size of a batch and this rank's share.
    """

    dataset: Any
    cut: Callable[..., Iterator[Kept]]
    options: LoaderOptions
    pool: Pool

    def batches(self, epoch: int, position: int) -> Iterator[Delivery]:
        """Yield the batches of an epoch that follow after ``position`` samples."""
        cut = partial(self.cut, skip=position, collate=self.options.collate_fn or default_collate)
        one_pass = Pass(self.dataset, epoch, cut, f"allranks/stream/{self.options.seed}/{epoch}")
        for batch, counted, total, is_last in self.pool.batches(one_pass):
            position += total
            known = (0, total) if is_last else (None, None)
            yield Delivery(self.pool.finish(batch), counted, total, position, *known)


@dataclass
class ShardedSource:
    """Batches of this rank's own part of a stream.

    Before each step the ranks exchange how many samples they have for it. The first rank without any ends the epoch for
    all; samples that the others have read for the step are dropped. With several workers the dataset must divide the
    part among them, by ``torch.utils.data.get_worker_info()``; each worker has its own random numbers.
    ``drop_last`` also ends the epoch with a batch that is not full on some rank.
    """

    ctx: Context
    dataset: Any
    size: BatchSize
    options: LoaderOptions
    pool: Pool
    say: Callable[[str], None]
    drop_last: bool

    def batches(self, epoch: int, position: int) -> Iterator[Delivery]:
        """Yield the batches of an epoch after the ones that ``position`` counts."""
        cut = partial(_batches, size=self.size.rank, collate=self.options.collate_fn or default_collate)
        own = self.pool.batches(Pass(self.dataset, epoch, cut, f"allranks/part/{self.options.seed}/{epoch}/{{}}"))
        skip, least = position // self.size.total, self.size.rank if self.drop_last else 1
        for _ in range(skip):
            next(own, None)
        following = next(own, (None, 0))
        counts = self._agree(following[1])
        if not skip and not all(counts):
            raise RankError(
                f"the dataset gives rank {counts.index(0)} no samples",
                why="with sharded=True each rank has a part of its own, and all make the same number of steps",
                fix="give every rank a part, or use sharded=False, where each rank reads the complete stream",
            )
        done = skip
        while min(counts) >= least:
            (batch, samples), total, done = following, sum(counts), done + 1
            following = next(own, (None, 0))
            counts = self._agree(following[1])
            known = (None, None) if min(counts) >= least else (0, total)
            yield Delivery(self.pool.finish(batch), samples, total, done * self.size.total, *known)
        if any(counts):
            lacking = counts.index(min(counts))
            self.say(f"data: the epoch ended after {done} steps, for lack of samples on rank {lacking}")

    def _agree(self, samples: int) -> list[int]:
        """Return how many samples each rank has for the next step."""
        mine = [0] * self.ctx.world_size
        mine[self.ctx.rank] = samples
        return self.ctx.control.agree(*mine)


def _batches(samples: Iterable[Any], size: int, collate: Collate) -> Iterator[tuple[Any, int]]:
    """Yield batches, each with the number of its samples."""
    collected: list[Any] = []
    for sample in samples:
        collected.append(sample)
        if len(collected) == size:
            yield collate(collected), size
            collected = []
    if collected:
        yield collate(collected), len(collected)
