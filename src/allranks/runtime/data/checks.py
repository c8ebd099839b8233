"""What a script may get wrong about its data, said before the training starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from allranks.errors import RankError
from allranks.runtime.data.stream import too_few

Kind = Literal["map", "stream"]


class Facts(NamedTuple):
    """What the ranks tell each other about their loaders. All but node and CPUs must be alike."""

    samples: int | None
    global_batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    node: int
    cpus: list[int]


def kind_of(dataset: Any) -> Kind:
    """Tell whether samples have numbers (``map``), or can only be run through.

    Raises:
        RankError: neither, or it can be run through only once, or it is a DataLoader.
    """
    if isinstance(dataset, DataLoader):
        raise RankError(
            "the loader got a DataLoader, not a dataset",
            why="its batches would count as samples, and each rank would get all of them",
            fix=f"ctx.loader(dataset, batch_size={dataset.batch_size or 64}), with the DataLoader's own dataset",
        )
    if isinstance(dataset, IterableDataset):
        return "stream"
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return "map"
    name = type(dataset).__name__
    if hasattr(dataset, "__next__"):
        raise RankError(
            f"the dataset, a {name}, can be run through only once",
            why="each epoch runs through it anew, and a resume once more",
            fix="give an object whose __iter__() starts from the beginning, such as a torch IterableDataset",
        )
    if hasattr(dataset, "__iter__"):
        return "stream"
    raise RankError(
        f"the loader got a {name}, which is no dataset",
        why="a dataset has __getitem__ and __len__, or __iter__",
        fix="give a torch Dataset, a list or an IterableDataset; a DataLoader is not needed here",
    )


def length_of(dataset: Any) -> int:
    """Give the number of samples, which is not 0.

    Raises:
        RankError: there are none.
    """
    length = len(dataset)
    if length == 0:
        raise empty()
    return length


def empty() -> RankError:
    """Make the error for a dataset without samples."""
    return RankError(
        "the dataset is empty",
        why="its length is 0",
        fix="look whether the folder or filter that it is made from finds anything on this node",
    )


def check_alike(facts: Sequence[Facts]) -> None:
    """Compare what the ranks have.

    Raises:
        RankError: one has something else than rank 0; it says which rank and what.
    """
    for rank, theirs in enumerate(facts):
        for name in ("samples", "global_batch_size", "shuffle", "seed", "drop_last"):
            here, there = getattr(facts[0], name), getattr(theirs, name)
            if here != there:
                raise RankError(
                    f"the ranks disagree on their data: {name} is {there} on rank {rank} and {here} on rank 0",
                    why="all ranks must make the same steps, and share the same samples out",
                    fix="make dataset and loader alike on all ranks; the loader gives each rank its part",
                )


def check_enough(length: int, world_size: int) -> None:
    """See that there is a sample for each rank.

    Raises:
        RankError: there are none at all, or too few.
    """
    if length == 0:
        raise empty()
    if length < world_size:
        raise too_few(length, world_size)


def check_fills(length: int, batch: int) -> None:
    """See that there is one full batch, where only full ones are wanted.

    Raises:
        RankError: there is none.
    """
    if length < batch:
        raise RankError(
            f"the dataset has {length} samples, and a batch takes {batch}",
            why="drop_last=True leaves out what does not fill a batch",
            fix="take smaller batches, or drop_last=False",
        )


def check_numbers(workers: object, prefetch: object, seed: object) -> None:
    """See that numbers are numbers.

    Raises:
        RankError: one is not.
    """
    if workers != "auto" and not _whole(workers, 0):
        raise RankError(f"workers={workers!r}: no number of processes", fix='give "auto" or a number from 0 on')
    if not _whole(prefetch, 1):
        raise RankError(f"prefetch={prefetch!r}: no number of batches", fix="give a number from 1 on")
    if not _whole(seed, None):
        raise RankError(f"seed={seed!r} is no seed", fix="give a whole number")


def check_stream(kind: Kind, workers: object, *, sharded: bool, fetch: str) -> None:
    """See that what is asked for goes with the kind of dataset.

    Raises:
        RankError: it does not.
    """
    if sharded and kind == "map":
        raise RankError(
            "sharded=True with a dataset whose samples have numbers",
            why="the loader gives each rank its part of such a dataset",
            fix="give every rank the whole dataset, without sharded=True",
        )
    if kind == "stream" and not sharded and isinstance(workers, int) and workers > 1:
        raise RankError(
            f"workers={workers} for a stream",
            why="each worker would have to run through the whole stream",
            fix="workers=1, or sharded=True if the dataset divides itself among ranks and workers",
        )
    if fetch not in ("auto", "item"):
        raise RankError(f"fetch={fetch!r} is no way to fetch", fix='fetch="auto" or fetch="item"')


def _whole(value: object, least: int | None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)
