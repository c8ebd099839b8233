"""Batches of a dataset whose samples have numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from allranks.runtime.data.fetch import Fetch
from allranks.runtime.data.order import Order, part
from allranks.runtime.data.workers import Pool


class Delivery(NamedTuple):
    """A batch, and what it stands for.

    Attributes:
        batch: of this rank.
        samples: of this rank that count; 0 for a filler.
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


class Source(Protocol):
    """What gives the batches of one rank."""

    def batches(self, epoch: int, position: int) -> Iterator[Delivery]:
        """Give the batches of an epoch that follow after ``position`` samples."""

    def close(self) -> None:
        """End what works beside the rank."""


class Cuts(Protocol):
    """How the samples of an epoch are cut into global batches."""

    def batches(self, position: int) -> Iterable[tuple[int, int]]:
        """Give start and stop of each that follows."""

    def count(self, position: int) -> int:
        """Give their number."""

    def last(self, position: int) -> int:
        """Give the number of samples of the last one."""


@dataclass(frozen=True)
class Share:
    """Which part of each batch is this rank's.

    Attributes:
        rank: the number of this rank.
        world_size: the number of ranks.
        filler: whether the rank gets one sample that does not count where it would get none.
    """

    rank: int
    world_size: int
    filler: bool


@dataclass(frozen=True)
class Handling:
    """What is done with a batch on its way.

    Attributes:
        workers: processes that fetch; 0: the rank itself does.
        prefetch: batches that each worker has ready.
        pinned: whether batches go into pinned memory, from where a GPU takes them without being waited for.
        init: called in each worker with its number.
    """

    workers: int
    prefetch: int
    pinned: bool
    init: Callable[[int], None] | None = None


class MapSource:
    """Batches of a dataset with ``__getitem__``.

    Args:
        order: of the samples.
        cuts: of the order into global batches.
        share: of each batch that is this rank's.
        fetch: gets samples.
        handling: of the batches.
        finish: called with each batch, in the rank; it pins and moves.
    """

    def __init__(
        self,
        order: Order,
        cuts: Cuts,
        share: Share,
        fetch: Fetch,
        handling: Handling,
        finish: Callable[[Any], Any],
    ) -> None:
        self._order = order
        self._cuts = cuts
        self._share = share
        self._fetch = fetch
        self._finish = finish
        self._requests = _Requests()
        self._pool = Pool(_loader_maker(fetch, self._requests, handling), handling.init) if handling.workers else None

    def batches(self, epoch: int, position: int) -> Iterator[Delivery]:
        """Give the batches of an epoch that follow after ``position`` samples."""
        finish, left, last = self._finish, self._cuts.count(position), self._cuts.last(position)
        fetched = self._fetched(epoch, position)
        for start, stop, begin, end in self._parts(position):
            left -= 1
            yield Delivery(finish(next(fetched)), end - begin, stop - start, stop, left, last)

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()

    def _parts(self, position: int) -> Iterator[tuple[int, int, int, int]]:
        """Give start and stop of each global batch in which this rank takes part, and of its part, if any."""
        rank, world_size, filler = self._share.rank, self._share.world_size, self._share.filler
        for start, stop in self._cuts.batches(position):
            begin, end = part(start, stop, rank, world_size)
            if begin < end or filler:
                yield start, stop, begin, end

    def _fetched(self, epoch: int, position: int) -> Iterator[Any]:
        take, fetch, parts = self._order.take, self._fetch, self._parts(position)
        wanted = (
            take(epoch, begin, end) if begin < end else take(epoch, start, start + 1) for start, _, begin, end in parts
        )
        if self._pool is None:
            return (fetch(epoch, numbers) for numbers in wanted)
        self._requests.following = ((epoch, numbers.tolist()) for numbers in wanted)
        return self._pool.batches()


class _Requests:
    """What torch's data loader takes for a sampler: it gives what a worker is asked for."""

    following: Iterator[tuple[int, list[int]]] = iter(())

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return self.following


class _Answers:
    """What torch's data loader takes for a dataset: its samples are whole batches."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, request: tuple[int, list[int]]) -> Any:
        epoch, numbers = request
        return self._fetch(epoch, torch.tensor(numbers))


def as_it_is(batch: Any) -> Any:
    """Collate nothing."""
    return batch


def _loader_maker(
    fetch: Fetch, requests: _Requests, handling: Handling
) -> Callable[[Callable[[int], None]], DataLoader[Any]]:
    def make(init: Callable[[int], None]) -> DataLoader[Any]:
        return DataLoader(
            _Answers(fetch),  # type: ignore[arg-type]
            sampler=requests,
            batch_size=None,
            collate_fn=as_it_is,
            num_workers=handling.workers,
            prefetch_factor=handling.prefetch,
            pin_memory=handling.pinned,
            persistent_workers=True,
            worker_init_fn=init,
            # Of its own: it draws a number each time, which is not to come from the training's generator.
            generator=torch.Generator(),
        )

    return make
