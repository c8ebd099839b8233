"""The loaders that a script iterates: batches of this rank; for training with a position that can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from allranks.errors import RankError
from allranks.runtime.call_errors import answering, is_whole
from allranks.runtime.data.mapped import BatchSize, BatchSource
from allranks.runtime.progress import Progress, advance
from allranks.runtime.steptime import COMPUTE, DATA, OTHER

#: Settings that a saved position depends on, each with the texts of the error if it differs.
_SAME = {
    "kind": ("a dataset of kind {0} and not {1}", "ctx.loader() gets the same kind of dataset"),
    "length": ("{0} samples and not {1}", "it gets the same dataset"),
    "seed": ("seed {0} and not {1}", "ctx.loader() or allranks.init() gets seed={0}"),
    "shuffle": ("shuffle={0} and not shuffle={1}", "ctx.loader() gets shuffle={0}"),
}


class Loader:
    """Batches of this rank, on its device. Made by ``ctx.loader()``.

    It keeps its position in the epoch and yields each batch once: after a ``break``, the next loop in the same epoch
    continues. A loop ends at the end of the epoch, and when ``ctx.stopping`` becomes True.

    Attributes:
        dataset: the dataset.
        batch_size: number of samples in a full batch on this rank.
        global_batch_size: number of samples in a full batch over all ranks.
    """

    def __init__(
        self,
        dataset: Any,
        source: BatchSource,
        size: BatchSize,
        progress: Progress,
        identity: dict[str, Any],
        *,
        world_size: int,
        length: int | None,
        say: Callable[[str], None],
    ) -> None:
        self.dataset = dataset
        self.batch_size = size.rank
        self.global_batch_size = size.total
        self._source = source
        self._progress = progress
        self._identity = identity
        self._world_size = world_size
        self._length = length
        self._say = say
        self._epoch = 0
        self._position = 0
        #: Where epochs() starts, until it has started.
        self._start: tuple[int, int] | None = (0, 0)
        self._in_epochs = False
        self._count = 0
        self._passed = False
        self._turn = 0
        self._loads = 0

    @property
    def epoch(self) -> int:
        """The number of the current epoch, from 0."""
        return self._epoch

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is a stream, of which an epoch has no length that is known."""
        return self._length is None

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, the same on all ranks.

        Raises:
            TypeError: the dataset is a stream, which has no length.
        """
        if self._length is None:
            raise TypeError("a loader of a stream has no length")
        return self._length

    @answering
    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, up to ``count``; each stands for one pass over the loader.

        After a resume it starts with the epoch in which the checkpoint was saved, and the loop over the loader yields
        the batches that are left of it. If that was in the last step, none are left, and the code after the loop runs.
        If the checkpoint was saved after the loop, it starts with the next epoch. It ends early when ``ctx.stopping``
        becomes True. Batches taken before the first call do not count.

        Args:
            count: number of epochs of the whole training, over all its attempts.

        Raises:
            RankError: ``count`` is negative or not an integer.
        """
        if not is_whole(count, 0):
            raise RankError(f"invalid number of epochs: epochs({count!r})", fix="give a whole number from 0 on")
        return self._epochs(count)

    def _epochs(self, count: int) -> Iterator[int]:
        if self._start is not None:
            (self._epoch, self._position), self._start = self._start, None
            if 0 < count <= self._epoch:  # A resumed training, which would end silently.
                what = "raise their number to train on, or start without the checkpoint"
                self._say(f"all {count} epochs are done: {what}")
        self._in_epochs, self._count = True, count
        try:
            while self._epoch < count and not self._progress.stopping:
                loads, self._passed = self._loads, False
                yield self._epoch
                if self._progress.stopping:
                    return
                if loads == self._loads:
                    if self._position and not self._passed:
                        self._progress.abandon()  # Micro-batches of the epoch that was left.
                    self._epoch, self._position = self._epoch + 1, 0
        finally:
            self._in_epochs, self._count = False, 0

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left of the epoch. Outside of :meth:`epochs`, the next loop is the next epoch.

        There a loop that left with the last batch has completed its epoch too: to resume exactly, use :meth:`epochs`.

        Raises:
            RankError: the whole epoch was already yielded. A loop also raises it if another loop was started, or a
                state was loaded, in the meantime.
        """
        if self._in_epochs and self._passed:
            raise RankError(
                f"a second pass over the loader in epoch {self._epoch}",
                why="loader.epochs() yields each sample once in an epoch",
                fix="use ctx.evaluation_loader() for a pass that is not training, or one more epoch",
            )
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        progress = self._progress
        if progress.stopping:
            return
        self._turn += 1
        turn, clock = self._turn, progress.clock
        clock.enter(DATA)
        try:
            batches = self._source.batches(self._epoch, self._position)
            first = next(batches, None)
            if first is None and self._position and not self._in_epochs:
                # The previous loop stopped at the last batch, as Trainers do that count batches.
                self._epoch, self._position = self._epoch + 1, 0
                batches = self._source.batches(self._epoch, 0)
            epoch = (self._epoch + 1, self._count, self._length or 0)
            for batch, samples, total, position, left, last in batches if first is None else chain([first], batches):
                progress.samples = samples
                progress.total = total
                progress.full = self.global_batch_size
                progress.last = last
                progress.left = left
                progress.epoch = epoch
                # The current batch counts as done: checkpoints are taken at the end of a step.
                self._position = position
                advance()
                clock.enter(COMPUTE)
                yield batch
                clock.enter(DATA)
                if turn != self._turn:
                    raise RankError(
                        "this loop over the loader cannot continue",
                        why="another loop over it was started, or a state was loaded into it, in the meantime",
                        fix="finish or leave one loop before the next; two passes at a time need two loaders",
                    )
                if progress.stopping:
                    return
            if self._in_epochs:
                self._passed = True
            else:
                self._epoch, self._position = self._epoch + 1, 0
        finally:
            clock.enter(OTHER)
            if turn == self._turn:
                progress.samples = progress.total = progress.full = progress.last = progress.left = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, in samples that were yielded over all ranks, and what it depends on.

        In the loop, the current batch counts as done. After the loop the whole epoch does, including what the script
        does at its end. For a ``sharded`` stream the position is the number of batches times the size of a full one.
        """
        epoch, position = (self._epoch + 1, 0) if self._in_epochs and self._passed else (self._epoch, self._position)
        return {
            "epoch": epoch,
            "position": position,
            **self._identity,
            "global_batch_size": self.global_batch_size,
            "world_size": self._world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of :meth:`state_dict`, also on another number of ranks or with another batch size.

        Only for a ``sharded`` stream do these change which samples follow.

        Raises:
            RankError: the state is of another dataset, seed or order, or is not a loader's.
        """
        epoch, position = self._place_in(state)
        self._epoch, self._position = epoch, position
        self._start = None if self._in_epochs else (epoch, position)
        self._passed = False
        self._turn += 1
        self._loads += 1
        self._progress.abandon()
        before = state.get("global_batch_size", self.global_batch_size)
        if before != self.global_batch_size:
            self._say(f"batch: {self.global_batch_size} samples a step from here on, {before} until the checkpoint")

    def _place_in(self, state: dict[str, Any]) -> tuple[int, int]:
        try:
            for name, (difference, fix) in _SAME.items():
                if state[name] != self._identity[name]:
                    raise RankError(
                        "the loader's position in the checkpoint is of "
                        f"{difference.format(state[name], self._identity[name])}",
                        why="the order of samples depends on it, so this loader cannot continue there",
                        fix=f"see that {fix.format(state[name])}; to keep only the weights, load the "
                        "checkpoint without the loader",
                    )
            return int(state["epoch"]), int(state["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise RankError(
                "the checkpoint holds no state of a loader",
                why=f"{type(error).__name__}: {error}",
                fix="give ctx.checkpoints() the loader by the same name as when the checkpoint was written",
            ) from error

    def close(self) -> None:
        """Stop the workers, if there are any. Iterating starts new ones."""
        self._source.pool.close()


class EvaluationLoader:
    """Batches of this rank, each sample exactly once over all ranks. Made by ``ctx.evaluation_loader()``.

    Batches hold no padding, so sums over batches are right as they are. While it is iterated, ``ctx.progress``
    describes its batches, and afterwards the training's again.

    Attributes:
        dataset: the dataset.
        batch_size: number of samples in a full batch on this rank.
    """

    def __init__(
        self, dataset: Any, source: BatchSource, batch_size: int, progress: Progress, length: int | None
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._source = source
        self._progress = progress
        self._length = length

    def __len__(self) -> int:
        """Return the number of batches of this rank.

        Raises:
            TypeError: the dataset is a stream, which has no length.
        """
        if self._length is None:
            raise TypeError("an evaluation loader of a stream has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Yield all batches, from the first."""
        progress = self._progress
        before, phase = _fields(progress), progress.clock.enter(OTHER)
        written: tuple[int | None, ...] | None = None
        full = None
        try:
            for batch, samples, total, _, left, last in self._source.batches(0, 0):
                full = full or total
                written = (samples, total, full, last, left)
                progress.samples, progress.total, progress.full, progress.last, progress.left = written
                advance()
                yield batch
        finally:
            progress.clock.enter(phase)
            # An abandoned loop may be collected late: it must not overwrite newer values.
            if _fields(progress) == written:
                progress.samples, progress.total, progress.full, progress.last, progress.left = before

    def close(self) -> None:
        """Stop the workers, if there are any. Iterating starts new ones."""
        self._source.pool.close()


def _fields(progress: Progress) -> tuple[int | None, ...]:
    return (progress.samples, progress.total, progress.full, progress.last, progress.left)
