"""In which messages ranks average the gradients of a model, told before there are ranks: for ``allranks estimate``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from allranks.record.estimate import BUCKET, FIRST_BUCKET
from allranks.runtime.model.allreduce import LEAST
from allranks.runtime.model.flat import LARGE


class Traffic(NamedTuple):
    """Bytes of gradients in a step.

    Attributes:
        messages: of each all-reduce.
        shared: what ranks on the CPUs of one machine average through memory instead; 0 if they do not.
    """

    messages: tuple[int, ...]
    shared: int = 0


def of_buckets(parameters: Iterable[Tensor], itemsize: int | None = None) -> Traffic:
    """Return the messages of torch's DistributedDataParallel, of numbers of ``itemsize`` bytes; None: as they are.

    torch sorts its buckets after the first step, by the order in which gradients are ready: that of the parameters,
    reversed (``Reducer::rebuild_buckets``, ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d).
    """
    return Traffic(tuple(_buckets([*parameters], itemsize)))


def _buckets(parameters: list[Tensor], itemsize: int | None) -> Iterator[int]:
    for group in _by_type(parameters):
        limit, held, sent = FIRST_BUCKET, 0, 0
        for parameter in reversed(group):
            held += parameter.nbytes
            sent += parameter.numel() * (itemsize or parameter.element_size())
            if held >= limit:
                yield sent
                limit, held, sent = BUCKET, 0, 0
        if held:
            yield sent


def of_flat(parameters: Iterable[Tensor], itemsize: int | None = None) -> Traffic:
    """Return the messages of :class:`allranks.runtime.model.flat.Flat`; ``itemsize`` as for buckets."""
    messages, shared = [], 0
    for group in _by_type(parameters):
        size = itemsize or group[0].element_size()
        small = sum(each.numel() for each in group if each.numel() < LARGE)
        messages += [each.numel() * size for each in group if each.numel() >= LARGE] + ([small * size] if small else [])
        total = sum(each.nbytes for each in group)
        shared += total if itemsize is None and total >= LEAST else 0
    return Traffic(tuple(messages), shared)


def _by_type(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    found: dict[object, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        found[parameter.dtype].append(parameter)
    return [*found.values()]
