"""The size of a batch: on one rank and over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from allranks.errors import RankError


@dataclass(frozen=True)
class BatchSize:
    """Samples of a full batch: on each rank, and over all ranks."""

    rank: int
    total: int

    def words(self, world_size: int) -> str:
        """Return ``256 samples (4 ranks x 64)``."""
        return f"{self.total} samples ({world_size} rank{'s' * (world_size != 1)} x {self.rank})"


def resolve(batch_size: int | None, global_batch_size: int | None, world_size: int) -> BatchSize:
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


def positive(name: str, value: object) -> int:
    """Return a value that must be an integer greater than 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RankError(f"invalid number of samples: {name}={value!r}", fix=f"give {name} as a whole number from 1 on")
    return value


def scale_factor(name: str, rule: object, ratio: float) -> float:
    """Return the factor of a learning rate by a rule, an argument of this name, for a batch so many times as large."""
    if rule not in ("linear", "sqrt"):
        raise RankError(f"invalid rule for the learning rate: {name}={rule!r}", fix='give "linear" or "sqrt"')
    return ratio if rule == "linear" else math.sqrt(ratio)
