"""How the samples of a batch are got from a dataset: all at once where it can, else one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

from allranks.runtime.data.randomness import Seed, Seeding

#: Puts a list of samples together to a batch.
Collate = Callable[[list[Any]], Any]
#: How samples are fetched: as the dataset can, or one by one in any case.
Fetching = Literal["auto", "item"]


class TensorFetch:
    """Takes rows of the tensors of a ``TensorDataset``, and no sample by itself."""

    in_memory = True

    def __init__(self, tensors: Sequence[torch.Tensor], among: torch.Tensor | None) -> None:
        self._tensors = tensors
        self._among = among

    def __call__(self, epoch: int, numbers: torch.Tensor) -> list[torch.Tensor]:
        """Give the rows of these numbers, as new tensors: as a list, like torch's own loader."""
        rows = numbers if self._among is None else self._among.index_select(0, numbers)
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in self._tensors]


class ListFetch:
    """Calls the dataset's ``__getitems__`` with a list of numbers.

    What that returns as a list are samples, as torch has it. Anything else is a batch already.
    """

    in_memory = True

    def __init__(self, dataset: Any, seeding: Seeding, collate: Collate | None, among: torch.Tensor | None) -> None:
        self._dataset = dataset
        self._seeding = seeding
        self._collate = collate
        self._among = among

    def __call__(self, epoch: int, numbers: torch.Tensor) -> Any:
        """Fetch a batch, with the generators seeded once, for its first sample."""
        rows = numbers if self._among is None else self._among.index_select(0, numbers)
        listed = rows.tolist()

        def read(seed: Seed) -> Any:
            seed(listed[0])
            got = self._dataset.__getitems__(listed)
            if self._collate is not None:
                return self._collate(got)
            return default_collate(got) if isinstance(got, list) else got

        return self._seeding.run(epoch, read)


class ItemFetch:
    """Calls the dataset with one number after the other, the generators seeded for each."""

    in_memory = False

    def __init__(self, dataset: Any, seeding: Seeding, collate: Collate | None) -> None:
        self._dataset = dataset
        self._seeding = seeding
        self._collate = collate

    def __call__(self, epoch: int, numbers: torch.Tensor) -> Any:
        """Fetch a batch; a collate function of the user's is seeded with the number of the first sample."""
        listed, dataset = numbers.tolist(), self._dataset

        def read(seed: Seed) -> Any:
            samples = []
            for number in listed:
                seed(number)
                samples.append(dataset[number])
            if self._collate is None:
                return default_collate(samples)
            seed(~listed[0])
            return self._collate(samples)

        return self._seeding.run(epoch, read)


Fetch = TensorFetch | ListFetch | ItemFetch


def choose(dataset: Any, seeding: Seeding, collate: Collate | None, how: Fetching = "auto") -> Fetch:
    """Choose the fastest way that gives the same samples as ``dataset[i]``."""
    if how == "item":
        return ItemFetch(dataset, seeding, collate)
    inner, among = _unwrap(dataset)
    if collate is None and _has_own(inner, TensorDataset):
        return TensorFetch(inner.tensors, among)
    if _fetches_lists(inner):
        return ListFetch(inner, seeding, collate, among)
    return ItemFetch(dataset, seeding, collate)


def _unwrap(dataset: Any) -> tuple[Any, torch.Tensor | None]:
    """Take plain ``Subset``s off; give what is inside, and the numbers that the samples have in there."""
    outer, among = dataset, None
    while _has_own(dataset, Subset):
        numbers = torch.as_tensor(dataset.indices, dtype=torch.int64)
        if (numbers < 0).any():  # counted from the end: only the datasets themselves know what that is
            return outer, None
        among = numbers if among is None else numbers.index_select(0, among)
        dataset = dataset.dataset
    return dataset, among


def _has_own(dataset: Any, kind: type[Any]) -> bool:
    """Tell whether a dataset is of this kind, and a class of the user's has not changed what its samples are."""
    own: Any = kind
    return isinstance(dataset, kind) and type(dataset).__getitem__ is own.__getitem__


def _fetches_lists(dataset: Any) -> bool:
    """Tell whether ``__getitems__`` is there and as recent as ``__getitem__``.

    A subclass that gives ``__getitem__`` alone means it, and its parent's ``__getitems__`` goes past it. Torch's
    own containers have one that asks the datasets inside sample by sample, which would go past the seeds.
    """
    if isinstance(dataset, (Subset, StackDataset)):
        return False
    for kind in type(dataset).__mro__:
        if "__getitems__" in vars(kind):
            return True
        if "__getitem__" in vars(kind):
            return False
    return False
