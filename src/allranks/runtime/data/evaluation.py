"""What an evaluation iterates: each sample exactly once over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from allranks.runtime.data.mapped import Source
from allranks.runtime.progress import Progress


@dataclass(frozen=True)
class Even:
    """Global batches that were cut beforehand, as start and stop."""

    cuts: list[tuple[int, int]]

    def batches(self, position: int = 0) -> list[tuple[int, int]]:
        """Give all of them: an evaluation begins at its beginning."""
        return self.cuts

    def count(self, position: int = 0) -> int:
        """Give their number."""
        return len(self.cuts)

    def last(self, position: int = 0) -> int:
        """Give the number of samples of the last one."""
        start, stop = self.cuts[-1]
        return stop - start


class EvaluationLoader:
    """Batches of this rank, each sample exactly once over all ranks. Made by ``ctx.evaluation_loader()``.

    Batches hold no padding, so sums over batches are right as they are. While it is iterated, ``ctx.progress``
    describes its batches, and afterwards the training's again.

    Attributes:
        dataset: the dataset.
        batch_size: number of samples in a full batch on this rank.
    """

    def __init__(
        self, dataset: Any, source: Source, batch_size: int, progress: Progress, count: Callable[[], int] | None
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._source = source
        self._progress = progress
        self._count = count

    def __len__(self) -> int:
        """Return the number of batches of this rank.

        Raises:
            TypeError: the dataset is a stream, which has no length.
        """
        if self._count is None:
            raise TypeError("an evaluation loader of a stream has no length")
        return self._count()

    def __iter__(self) -> Iterator[Any]:
        """Yield all batches, from the first."""
        progress = self._progress
        before = _fields(progress)
        written: tuple[int | None, ...] | None = None
        full = None
        try:
            for batch, samples, total, _, left, last in self._source.batches(0, 0):
                full = full or total
                written = (samples, total, full, last, left)
                progress.samples, progress.total, progress.full, progress.last, progress.left = written
                yield batch
        finally:
            # A loop that was left long ago and is collected now must not undo what came after it.
            if _fields(progress) == written:
                progress.samples, progress.total, progress.full, progress.last, progress.left = before

    def close(self) -> None:
        """Stop the workers, if there are any. Iterating starts new ones."""
        self._source.close()


def _fields(progress: Progress) -> tuple[int | None, ...]:
    return (progress.samples, progress.total, progress.full, progress.last, progress.left)
