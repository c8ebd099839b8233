"""Batches of a dataset that can only be run through (``IterableDataset``), read in full by every rank.

Each rank runs through the whole stream and keeps its own samples: every world size has the same global batches,
and a resume skips what was done. That is exact as long as the stream is the same each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from allranks.errors import RankError
from allranks.runtime.data.fetch import Collate
from allranks.runtime.data.mapped import Delivery, Handling, Share, as_it_is
from allranks.runtime.data.randomness import Apart
from allranks.runtime.data.workers import Pool


class Kept(NamedTuple):
    """What a rank keeps of a global batch: its samples, how many count, how many there are, whether it is the last."""

    samples: Any
    counted: int
    total: int
    is_last: bool


@dataclass(frozen=True)
class Rule:
    """How a stream is cut.

    Attributes:
        size: samples of a global batch.
        share: of each that is this rank's: sample ``k`` of a batch goes to rank ``k mod world size``.
        drop_last: whether what does not fill a batch at the end is left out.
        even: whether the last batch takes in what is left when that is too little for all ranks.
    """

    size: int
    share: Share
    drop_last: bool = False
    even: bool = False


def cut(samples: Iterable[Any], rule: Rule, skip: int = 0) -> Iterator[Kept]:
    """Give what a rank keeps of each global batch after the first ``skip`` samples.

    Raises:
        RankError: the stream has no samples, fewer than there are ranks, or fewer than are to be skipped.
    """
    stream = iter(samples)
    skipped = sum(1 for _ in islice(stream, skip))
    # Whether a batch is the last shows only in what comes after it.
    need = rule.size if rule.drop_last else rule.share.world_size if rule.even else 1
    ahead = deque(islice(stream, need))
    _check(skipped, skip, len(ahead), rule)
    batch = _Batch(rule.share)
    done = skip
    while ahead and not (rule.drop_last and batch.total == 0 and len(ahead) < need):
        if batch.total >= rule.size and (len(ahead) >= need or rule.drop_last):
            is_last = rule.drop_last and len(ahead) < need
            done += batch.total
            yield from batch.kept(is_last)
            if is_last:
                return
            batch = _Batch(rule.share)
        batch.add(ahead.popleft())
        ahead.extend(islice(stream, 1))
    if batch.total and not (rule.drop_last and batch.total < rule.size):
        _check_enough(done + batch.total, rule)
        yield from batch.kept(True)


class _Batch:
    """A global batch that is being collected, of which a rank keeps its own samples, and the first for a filler."""

    def __init__(self, share: Share) -> None:
        self.total = 0
        self._share = share
        self._mine: list[Any] = []
        self._first: list[Any] = []

    def add(self, sample: Any) -> None:
        if self.total == 0:
            self._first = [sample]
        if self.total % self._share.world_size == self._share.rank:
            self._mine.append(sample)
        self.total += 1

    def kept(self, is_last: bool) -> Iterator[Kept]:
        if self._mine or self._share.filler:
            yield Kept(self._mine or self._first, len(self._mine), self.total, is_last)


def _check(skipped: int, skip: int, following: int, rule: Rule) -> None:
    if skipped < skip:
        raise RankError(
            f"the stream ended after {skipped} samples, but {skip} of this epoch are done already",
            why="it is not the stream that the checkpoint was taken with",
            fix="give the same stream, or load the checkpoint without the loader",
        )
    if not following and not skip:
        raise RankError("the dataset is empty", why="the stream ended before its first sample")
    if rule.drop_last and following < rule.size and not skip:
        raise RankError(
            f"the stream has {following} samples, and a batch takes {rule.size}",
            why="drop_last=True leaves out what does not fill a batch",
            fix="take smaller batches, or drop_last=False",
        )


def _check_enough(samples: int, rule: Rule) -> None:
    if samples < rule.share.world_size and (rule.share.filler or rule.even):
        raise too_few(samples, rule.share.world_size)


def too_few(samples: int, world_size: int) -> RankError:
    """Make the error for a dataset that has not one sample for each rank."""
    return RankError(
        f"the dataset has {samples} sample{'s' * (samples != 1)}, fewer than there are ranks ({world_size})",
        why="every rank needs one at least",
        fix=f"take {samples} rank{'s' * (samples != 1)} or fewer, or more data",
    )


class StreamSource:
    """Batches of a stream that every rank runs through.

    Args:
        dataset: gives the stream anew with each ``iter()``; if it has ``set_epoch``, that is called before.
        rule: how the stream is cut.
        collate: puts samples together to a batch.
        handling: of the batches; with a worker, that one runs through the stream.
        seed: the generators are seeded with this and the epoch when the stream begins, alike on all ranks.
        finish: called with each batch, in the rank.
    """

    def __init__(
        self,
        dataset: Any,
        rule: Rule,
        collate: Collate | None,
        handling: Handling,
        seed: int,
        finish: Callable[[Any], Any],
    ) -> None:
        self._reader = _Reader(dataset, rule, collate or default_collate, seed)
        self._handling = handling
        self._finish = finish
        self._pool: Pool | None = None

    def batches(self, epoch: int, position: int) -> Iterator[Delivery]:
        """Give the batches of an epoch that follow after ``position`` samples."""
        try:
            for batch, counted, total, is_last in self._read(_Pass(self._reader, epoch, position)):
                position += total
                known = (0, total) if is_last else (None, None)
                yield Delivery(self._finish(batch), counted, total, position, *known)
        finally:
            self.close()

    def close(self) -> None:
        """End the worker; a pass over the stream begins with a new one."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _read(self, one_pass: _Pass) -> Iterator[Kept]:
        if not self._handling.workers:
            return iter(one_pass)
        self._pool = Pool(lambda init: stream_loader(one_pass, self._handling, init), self._handling.init)
        return self._pool.batches()


@dataclass(frozen=True)
class _Reader:
    dataset: Any
    rule: Rule
    collate: Collate
    seed: int

    def read(self, epoch: int, position: int) -> Iterator[Kept]:
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        for kept in cut(self.dataset, self.rule, position):
            yield kept._replace(samples=self.collate(kept.samples))


class _Pass(IterableDataset[Kept]):
    """One pass over the stream, wherever it is made; its random numbers are none of the training's."""

    def __init__(self, reader: _Reader, epoch: int, position: int) -> None:
        self._reader = reader
        self._epoch = epoch
        self._position = position

    def __iter__(self) -> Iterator[Kept]:
        name = f"allranks/stream/{self._reader.seed}/{self._epoch}"
        return iter(Apart(lambda: self._reader.read(self._epoch, self._position), name))


def stream_loader(
    dataset: IterableDataset[Any], handling: Handling, init: Callable[[int], None] | None
) -> DataLoader[Any]:
    """Make torch's loader for a dataset that gives whole batches."""
    return DataLoader(
        dataset,
        batch_size=None,
        collate_fn=as_it_is,
        num_workers=handling.workers,
        prefetch_factor=handling.prefetch if handling.workers else None,
        pin_memory=handling.pinned,
        worker_init_fn=init,
        generator=torch.Generator(),
    )
