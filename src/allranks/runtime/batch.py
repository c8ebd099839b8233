"""The size of a batch: on one rank, over all ranks, and what the learning rate has to do with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from allranks.errors import RankError


@dataclass(frozen=True)
class BatchSize:
    """Samples of a full batch.

    Attributes:
        rank: on each rank.
        total: over all ranks, ``rank`` times their number.
    """

    rank: int
    total: int

    def words(self, world_size: int) -> str:
        """Say it in words: ``256 samples (4 ranks x 64)``."""
        return f"{self.total} samples ({world_size} rank{'s' * (world_size != 1)} x {self.rank})"


def resolve(batch_size: int | None, global_batch_size: int | None, world_size: int) -> BatchSize:
    """Work out both sizes from the one that was given.

    Raises:
        RankError: both or none were given, or one that is no positive number, or a global one that does not divide.
    """
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
        raise _does_not_divide(total, world_size)
    return BatchSize(total // world_size, total)


def positive(name: str, value: object) -> int:
    """Return a whole number greater than 0.

    Raises:
        RankError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RankError(f"{name}={value!r} is no number of samples", fix=f"give {name} as a whole number from 1 on")
    return value


def _does_not_divide(total: int, world_size: int) -> RankError:
    below = total // world_size * world_size
    near = [str(size) for size in (below, below + world_size) if size]
    return RankError(
        f"global_batch_size={total} does not divide by {world_size} ranks",
        why="every rank works on the same number of samples in a step",
        fix=f"global_batch_size={' or '.join(near)}, or another number of ranks",
    )


def scaled_lr(lr: float, *, batch_size: int, base_batch_size: int, rule: Literal["linear", "sqrt"] = "linear") -> float:
    """Give the learning rate for a batch size, from one that was found to be good for another batch size.

    ``linear``: ``lr * batch_size / base_batch_size``, for SGD, with some epochs of warm-up where the factor is
    great (Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677,
    sections 2.1 and 2.2). ``sqrt``: ``lr * sqrt(batch_size / base_batch_size)``, which keeps the variance of a step
    (Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997,
    section 5; Hoffer et al. 2017, "Train longer, generalize better", arXiv:1705.08741, section 4); it is
    usual with Adam.

    Args:
        lr: the learning rate that is good for ``base_batch_size``.
        batch_size: samples of one optimizer step: over all ranks, times the micro-batches of an accumulation.
        base_batch_size: samples of one step for which ``lr`` was found.
        rule: ``"linear"`` or ``"sqrt"``.

    Raises:
        RankError: a batch size is not positive, the learning rate is negative or not finite, or no such rule.
    """
    factor = positive("batch_size", batch_size) / positive("base_batch_size", base_batch_size)
    if not (isinstance(lr, (int, float)) and math.isfinite(lr) and lr >= 0):
        raise RankError(f"lr={lr!r} is no learning rate", fix="give a finite number from 0 on")
    if rule not in ("linear", "sqrt"):
        raise RankError(f"there is no rule {rule!r} for the learning rate", fix='rule="linear" or rule="sqrt"')
    return lr * (factor if rule == "linear" else math.sqrt(factor))
