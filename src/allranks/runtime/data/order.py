"""Which samples are in which batch, and which rank gets which of them. Nothing here knows of processes.

The order of an epoch depends on seed, epoch and length alone. Global batch ``b`` holds the samples
``order[b * G : (b + 1) * G]``, whatever the number of ranks; a rank takes its contiguous part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


def epoch_seed(seed: int, epoch: int) -> int:
    """Give the seed of an epoch's order: 63 bits of SHA-256 of seed and epoch.

    ``seed + epoch`` would give epoch 1 of seed 0 the order of epoch 0 of seed 1.
    """
    digest = hashlib.sha256(f"allranks/order/{seed}/{epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def part(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """Give the part of ``start`` to ``stop`` that belongs to a rank; sizes differ by at most 1, the first are greater.

    A rank for which nothing is left gets an empty part.
    """
    base, extra = divmod(stop - start, world_size)
    begin = start + rank * base + min(rank, extra)
    return begin, begin + base + (rank < extra)


class Order:
    """The order of samples in each epoch.

    Args:
        length: number of samples.
        seed: equal seeds give equal orders, on any number of ranks.
        shuffle: False keeps the samples as they are, in every epoch.
    """

    def __init__(self, length: int, seed: int, *, shuffle: bool = True) -> None:
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self._epoch: int | None = None
        self._drawn = torch.empty(0, dtype=torch.int64)

    def take(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        """Give the numbers of the samples at positions ``start`` to ``stop`` of an epoch, as int64."""
        if not self.shuffle:
            return torch.arange(start, stop)
        if self._epoch != epoch:
            generator = torch.Generator().manual_seed(epoch_seed(self.seed, epoch))
            self._drawn = torch.randperm(self.length, generator=generator)
            self._epoch = epoch
        return self._drawn[start:stop]


@dataclass(frozen=True)
class Split:
    """How the samples of an epoch are cut into global batches.

    Args:
        length: samples in an epoch.
        batch: samples of a global batch.
        drop_last: whether what does not fill a batch at the end of an epoch is left out.
    """

    length: int
    batch: int
    drop_last: bool = False

    def count(self, position: int = 0) -> int:
        """Give the number of batches that follow after ``position`` samples."""
        left = max(0, self.length - position)
        return left // self.batch if self.drop_last else -(-left // self.batch)

    def last(self, position: int = 0) -> int:
        """Give the number of samples in the epoch's last batch."""
        return self.batch if self.drop_last else (self.length - position) % self.batch or self.batch

    def batches(self, position: int = 0) -> Iterator[tuple[int, int]]:
        """Give start and stop of each global batch that follows after ``position`` samples."""
        for number in range(self.count(position)):
            start = position + number * self.batch
            yield start, min(start + self.batch, self.length)


def even_batches(length: int, batch: int, world_size: int) -> list[tuple[int, int]]:
    """Cut an evaluation into global batches such that every rank has a sample in each, if there are enough.

    All are full but the last. If that one had fewer samples than there are ranks, it shares with the one before
    it, half and half; where that gives too few as well (batches of one sample a rank) the two are one.
    """
    cuts = list(Split(length, batch).batches())
    if len(cuts) < 2 or cuts[-1][1] - cuts[-1][0] >= world_size:
        return cuts
    start = cuts[-2][0]
    if length - start < 2 * world_size:
        return [*cuts[:-2], (start, length)]
    middle = (start + length + 1) // 2
    return [*cuts[:-2], (start, middle), (middle, length)]
