"""Batches of a map-style dataset, whose samples have indices.

The order of an epoch depends on seed, epoch and length alone. Global batch ``b`` holds the samples
``order[b * G : (b + 1) * G]``, whatever the number of ranks; a rank takes its contiguous part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from allranks.errors import RankError
from allranks.runtime.call_errors import positive
from allranks.runtime.data.fetch import Fetch
from allranks.runtime.data.workers import Pool
from allranks.runtime.seed import hashed


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of an epoch's order: 63 bits of SHA-256 of seed and epoch.

    ``seed + epoch`` would give epoch 1 of seed 0 the order of epoch 0 of seed 1.
    """
    return hashed(f"allranks/order/{seed}/{epoch}")


def part(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank's contiguous part of ``start`` to ``stop``; sizes differ by at most 1, and larger ones come first.

    The part may be empty.
    """
    base, extra = divmod(stop - start, world_size)
    begin = start + rank * base + min(rank, extra)
    return begin, begin + base + (rank < extra)


class Order:
    """The order of samples in each epoch: equal seeds give equal orders, on any number of ranks."""

    def __init__(self, length: int, seed: int, *, shuffle: bool = True) -> None:
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self._epoch: int | None = None
        self._drawn = torch.empty(0, dtype=torch.int64)

    def take(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        """Return the numbers of the samples at positions ``start`` to ``stop`` of an epoch, as int64."""
        if not self.shuffle:
            return torch.arange(start, stop)
        if self._epoch != epoch:
            generator = torch.Generator().manual_seed(epoch_seed(self.seed, epoch))
            self._drawn = torch.randperm(self.length, generator=generator)
            self._epoch = epoch
        return self._drawn[start:stop]


@dataclass(frozen=True)
class BatchSize:
    """Samples of a full batch: on each rank, and over all ranks."""

    rank: int
    total: int

    def words(self, world_size: int) -> str:
        """Return ``256 samples (4 ranks x 64)``."""
        return f"{self.total} samples ({world_size} rank{'s' * (world_size != 1)} x {self.rank})"


def batch_sizes(batch_size: int | None, global_batch_size: int | None, world_size: int) -> BatchSize:
    """Return both sizes from the one that was given."""
    if (batch_size is None) == (global_batch_size is None):
        given = "neither batch_size nor" if batch_size is None else "both batch_size and"
        raise RankError(
            f"the loader got {given} global_batch_size",
            why="batch_size counts the samples of one rank, global_batch_size those of all ranks",
            fix="give exactly one of them",
        )
    if batch_size is not None:
        size = positive("batch_size", batch_size)
        return BatchSize(size, size * world_size)
    assert global_batch_size is not None
    total = positive("global_batch_size", global_batch_size)
    if total % world_size:
        below = total // world_size * world_size
        near = [str(size) for size in (below, below + world_size) if size]
        raise RankError(
            f"global_batch_size={total} does not divide by {world_size} ranks",
            why="every rank works on the same number of samples in a step",
            fix=f"global_batch_size={' or '.join(near)}, or another number of ranks",
        )
    return BatchSize(total // world_size, total)


@dataclass(frozen=True)
class Split:
    """How the samples of an epoch are cut into global batches.

    Attributes:
        length: samples of the epoch.
        batch: samples of a full batch.
        drop_last: leave out what does not fill the last one.
        even_over: give each of so many ranks a sample in every batch, if there are enough. A last batch that is too
            small for that shares with the one before it, half and half; where that gives too few as well (batches of
            one sample a rank) the two are one.
    """

    length: int
    batch: int
    drop_last: bool = False
    even_over: int = 0

    def count_and_last(self, position: int = 0) -> tuple[int, int]:
        """Return the number of batches that follow after ``position`` samples, and the size of the epoch's last one."""
        full, rest = divmod(max(0, self.length - position), self.batch)
        if not rest or self.drop_last:
            return full, self.batch
        if full and rest < self.even_over:
            both = self.batch + rest
            return (full, both) if both < 2 * self.even_over else (full + 1, both // 2)
        return full + 1, rest

    def batches(self, position: int = 0) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each global batch after ``position`` samples."""
        count, last = self.count_and_last(position)
        end = position + count * self.batch if self.drop_last else self.length
        start = position
        for left in range(count, 0, -1):
            # The last two may have shared their samples.
            stop = start + self.batch if left > 2 else end - last * (left - 1)
            yield start, stop
            start = stop


class Delivery(NamedTuple):
    """A batch, and its place in the epoch.

    Attributes:
        batch: of this rank.
        samples: number of this rank's samples that count; 0 for a filler.
        total: samples over all ranks.
        position: samples of the epoch that are done when this batch is.
        left: batches that follow in the epoch; None where that is not known.
        last: samples over all ranks of the epoch's last batch; None where that is not known.
    """

    batch: Any
    samples: int
    total: int
    position: int
    left: int | None
    last: int | None


class BatchSource(Protocol):
    """The batches of one rank."""

    pool: Pool

    def batches(self, epoch: int, position: int) -> Iterator[Delivery]:
        """Yield the batches of an epoch that follow after ``position`` samples."""


@dataclass(frozen=True)
class Share:
    """This rank's part of each batch; if that is empty, a filler is one sample that does not count."""

    rank: int
    world_size: int
    filler: bool


class _Requests:
    """The sampler of torch's data loader: it yields requests for a worker."""

    following: Iterator[tuple[int, list[int]]] = iter(())

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return self.following


@dataclass
class MapSource:
    """Batches of a dataset with ``__getitem__``."""

    order: Order
    split: Split
    share: Share
    fetch: Fetch
    pool: Pool
    _requests: _Requests = field(default_factory=_Requests)

    def batches(self, epoch: int, position: int) -> Iterator[Delivery]:
        """Yield the batches of an epoch that follow after ``position`` samples."""
        finish, (left, last) = self.pool.finish, self.split.count_and_last(position)
        fetched = self._fetched(epoch, position)
        for start, stop, begin, end in self._parts(position):
            left -= 1
            yield Delivery(finish(next(fetched)), end - begin, stop - start, stop, left, last)

    def _parts(self, position: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield start and stop of each global batch in which this rank takes part, and of its part."""
        for start, stop in self.split.batches(position):
            begin, end = part(start, stop, self.share.rank, self.share.world_size)
            if begin < end or self.share.filler:
                yield start, stop, begin, end

    def _fetched(self, epoch: int, position: int) -> Iterator[Any]:
        take, fetch, parts = self.order.take, self.fetch, self._parts(position)
        # Instead of an empty part, the first sample of the batch: a filler.
        wanted = (take(epoch, *((begin, end) if begin < end else (start, start + 1))) for start, _, begin, end in parts)
        if not self.pool.workers:
            return (fetch(epoch, numbers) for numbers in wanted)
        self._requests.following = ((epoch, numbers.tolist()) for numbers in wanted)
        return self.pool.batches(_Answers(fetch), self._requests)


class _Answers:
    """The dataset of torch's data loader: its samples are whole batches."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, request: tuple[int, list[int]]) -> Any:
        epoch, numbers = request
        return self._fetch(epoch, torch.tensor(numbers))
