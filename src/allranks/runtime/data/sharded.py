"""Batches of a dataset that gives each rank a part of its own, of which nobody knows how long it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from allranks.errors import RankError
from allranks.runtime.batch import BatchSize
from allranks.runtime.control import Control
from allranks.runtime.data.fetch import Collate
from allranks.runtime.data.mapped import Delivery, Handling
from allranks.runtime.data.randomness import Apart
from allranks.runtime.data.stream import stream_loader
from allranks.runtime.data.workers import Pool


class ShardedSource:
    """Batches of this rank's own part of a stream.

    The ranks tell each other before each step how many samples they have for the next. The first that has none
    ends the epoch for all; what the others have read of it by then is dropped.

    Args:
        dataset: gives this rank's part with each ``iter()``; if it has ``set_epoch``, that is called before. With
            several workers it must divide the part among them itself, by ``torch.utils.data.get_worker_info()``.
        size: of a batch.
        collate: puts samples together to a batch.
        handling: of the batches.
        seed: the generators are seeded with this, the epoch and the worker's number when the part begins.
        control: how the ranks tell each other.
        rank: the number of this rank.
        finish: called with each batch, in the rank.
        say: how the user is told that samples are dropped.
        drop_last: whether a batch that is not full on some rank ends the epoch too.
    """

    def __init__(
        self,
        dataset: Any,
        size: BatchSize,
        collate: Collate | None,
        handling: Handling,
        *,
        seed: int,
        control: Control,
        rank: int,
        world_size: int,
        finish: Callable[[Any], Any],
        say: Callable[[str], None],
        drop_last: bool,
    ) -> None:
        self._dataset = dataset
        self._size = size
        self._collate = collate or default_collate
        self._handling = handling
        self._seed = seed
        self._control = control
        self._rank = rank
        self._world_size = world_size
        self._finish = finish
        self._say = say
        self._least = size.rank if drop_last else 1
        self._pool: Pool | None = None

    def batches(self, epoch: int, position: int) -> Iterator[Delivery]:
        """Give the batches of an epoch, without the first ones that ``position`` speaks of."""
        try:
            yield from self._deliver(self._own(epoch), position // self._size.total)
        finally:
            self.close()

    def close(self) -> None:
        """End the workers; a pass over the stream begins with new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _deliver(self, own: Iterator[tuple[Any, int]], skip: int) -> Iterator[Delivery]:
        for _ in range(skip):
            next(own, None)
        following = next(own, (None, 0))
        counts = self._agree(following[1])
        if not skip and not all(counts):
            raise _nothing_for(counts.index(0))
        done = skip
        while min(counts) >= self._least:
            (batch, samples), total, done = following, sum(counts), done + 1
            following = next(own, (None, 0))
            counts = self._agree(following[1])
            known = (None, None) if min(counts) >= self._least else (0, total)
            yield Delivery(self._finish(batch), samples, total, done * self._size.total, *known)
        if any(counts):
            lacking = counts.index(min(counts))
            self._say(f"data: the epoch ended after {done} steps, for lack of samples on rank {lacking}")

    def _agree(self, samples: int) -> list[int]:
        """Tell every rank how many samples this one has for the next step."""
        mine = [0] * self._world_size
        mine[self._rank] = samples
        return self._control.agree(*mine)

    def _own(self, epoch: int) -> Iterator[tuple[Any, int]]:
        part = _Part(self._dataset, self._size.rank, self._collate, f"allranks/part/{self._seed}/{epoch}")
        if not self._handling.workers:
            return iter(part)
        self._pool = Pool(lambda init: stream_loader(part, self._handling, init), self._handling.init)
        return self._pool.batches()


class _Part(IterableDataset[tuple[Any, int]]):
    """A rank's or worker's own part, in batches with the number of their samples."""

    def __init__(self, dataset: Any, size: int, collate: Collate, name: str) -> None:
        self._dataset = dataset
        self._size = size
        self._collate = collate
        self._name = name
        self._epoch = int(name.rpartition("/")[2])

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        return iter(Apart(self._read, f"{self._name}/{worker.id if worker else 0}"))

    def _read(self) -> Iterator[tuple[Any, int]]:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        samples: list[Any] = []
        for sample in self._dataset:
            samples.append(sample)
            if len(samples) == self._size:
                yield self._collate(samples), len(samples)
                samples = []
        if samples:
            yield self._collate(samples), len(samples)


def _nothing_for(rank: int) -> RankError:
    return RankError(
        f"the dataset gives rank {rank} no samples",
        why="with sharded=True each rank has a part of its own, and all make the same number of steps",
        fix="see that every rank gets a part, or take sharded=False, where each rank runs through the whole stream",
    )
