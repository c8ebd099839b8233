"""Fetches a batch from a dataset (all samples at once if possible, else one by one) and moves it to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

from allranks.runtime.data.randomness import Seed, Seeding

#: Makes a batch of a list of samples.
Collate = Callable[[list[Any]], Any]
#: "auto": the fastest way that the dataset supports; "item": always one by one.
Fetching = Literal["auto", "item"]


@dataclass(frozen=True, eq=False)
class TensorFetch:
    """Takes rows of the tensors of a ``TensorDataset``."""

    tensors: Sequence[torch.Tensor]
    among: torch.Tensor | None
    in_memory: ClassVar[bool] = True

    def __call__(self, epoch: int, numbers: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of these numbers as a list of new tensors, like torch's own loader."""
        rows = numbers if self.among is None else self.among.index_select(0, numbers)
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in self.tensors]


@dataclass(frozen=True, eq=False)
class ListFetch:
    """Calls the dataset's ``__getitems__`` with a list of numbers.

    A list that it returns holds samples, as in torch. Anything else is a complete batch.
    """

    dataset: Any
    seeding: Seeding
    collate: Collate | None
    among: torch.Tensor | None
    in_memory: ClassVar[bool] = True

    def __call__(self, epoch: int, numbers: torch.Tensor) -> Any:
        """Fetch a batch, with the generators seeded once, for its first sample."""
        rows = numbers if self.among is None else self.among.index_select(0, numbers)
        listed = rows.tolist()

        def read(seed: Seed) -> Any:
            seed(listed[0])
            got = self.dataset.__getitems__(listed)
            if self.collate is not None:
                return self.collate(got)
            return default_collate(got) if isinstance(got, list) else got

        return self.seeding.run(epoch, read)


@dataclass(frozen=True, eq=False)
class ItemFetch:
    """Calls the dataset once per sample, with the generators seeded for each."""

    dataset: Any
    seeding: Seeding
    collate: Collate | None
    in_memory: ClassVar[bool] = False

    def __call__(self, epoch: int, numbers: torch.Tensor) -> Any:
        """Fetch a batch; a collate function of the user's is seeded with the number of the first sample."""
        listed, dataset = numbers.tolist(), self.dataset

        def read(seed: Seed) -> Any:
            samples = []
            for number in listed:
                seed(number)
                samples.append(dataset[number])
            if self.collate is None:
                return default_collate(samples)
            seed(~listed[0])
            return self.collate(samples)

        return self.seeding.run(epoch, read)


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
    """Return the dataset inside plain ``Subset``s, and the indices of the samples in it."""
    outer, among = dataset, None
    while _has_own(dataset, Subset):
        numbers = torch.as_tensor(dataset.indices, dtype=torch.int64)
        if (numbers < 0).any():  # negative indices: only the dataset can resolve them
            return outer, None
        among = numbers if among is None else numbers.index_select(0, among)
        dataset = dataset.dataset
    return dataset, among


def _has_own(dataset: Any, kind: type[Any]) -> bool:
    """Return whether a dataset is of this type and no subclass overrides how samples are read."""
    own: Any = kind
    return isinstance(dataset, kind) and type(dataset).__getitem__ is own.__getitem__


def _fetches_lists(dataset: Any) -> bool:
    """Return whether ``__getitems__`` exists and is not inherited from above ``__getitem__``.

    A parent's ``__getitems__`` bypasses the ``__getitem__`` of a subclass. Those of torch's containers read the inner
    datasets sample by sample, and bypass the seeding.
    """
    if isinstance(dataset, (Subset, StackDataset)):
        return False
    for kind in type(dataset).__mro__:
        if "__getitems__" in vars(kind):
            return True
        if "__getitem__" in vars(kind):
            return False
    return False


def move(batch: Any, device: torch.device, *, pinned: bool) -> Any:
    """Return the batch on the device; the copy from pinned memory is asynchronous."""

    def moved(value: Any) -> Any:
        # The user's objects may not accept non_blocking.
        return value.to(device, non_blocking=pinned) if isinstance(value, torch.Tensor) else value.to(device)

    return _through(batch, moved)


def pin(batch: Any) -> Any:
    """Return the batch in pinned memory: its tensors on the CPU, and objects that can pin themselves."""

    def pinned(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.pin_memory() if value.device.type == "cpu" else value
        return value.pin_memory() if callable(getattr(value, "pin_memory", None)) else value

    return _through(batch, pinned)


def _through(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Change every tensor in a batch, and every object that has a method ``to``.

    Lists, tuples, named tuples and mappings are copied with their contents changed; all else stays as it is.
    """
    if callable(getattr(batch, "to", None)):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_through(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)([_through(value, change) for value in batch])
    if isinstance(batch, Mapping):
        return {key: _through(value, change) for key, value in batch.items()}
    return batch
