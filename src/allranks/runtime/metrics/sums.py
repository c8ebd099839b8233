"""Weighted sums of metrics: kept on the device where the values are, and read as late as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from allranks.errors import RankError

#: So many values that lie on a device are held before they are added up there, in a few operations for all of them.
_HELD = 64
#: Bytes of the largest number.
_ONE = 16


class Sums:
    """The weighted sum of one metric, and the sum of the weights.

    Numbers, and tensors in the CPU's memory, are added up as they come, in double precision. Reading a tensor on
    another device would stop the host until the device is there, so these are held, and added up by the device.
    """

    __slots__ = ("_held", "_part", "total", "weight")

    def __init__(self, total: float = 0.0, weight: float = 0.0) -> None:
        self.total = total
        self.weight = weight
        #: Value, weight, and the value's version: it changes when somebody writes into the tensor.
        self._held: list[tuple[torch.Tensor, float | torch.Tensor, int]] = []
        #: Sum and weight on a device, shape (2,).
        self._part: torch.Tensor | None = None

    def hold(self, value: torch.Tensor, weight: float | torch.Tensor) -> None:
        """Take a tensor of one number that is on a device other than the CPU."""
        value = value.detach()
        counted = not value.is_inference()
        # A copy of what has no count of versions, and of a part of a tensor, which would keep all of that in memory.
        if not counted or value.untyped_storage().nbytes() > _ONE:
            value = value.clone()
        self._held.append((value, weight, value._version if counted else -1))
        if len(self._held) >= _HELD:
            self.fold()

    def fold(self) -> None:
        """Add up what is held, on its device and without waiting for it.

        Raises:
            RankError: a tensor was changed after it had been logged.
        """
        by_device: dict[torch.device, list[tuple[torch.Tensor, float | torch.Tensor]]] = {}
        for value, weight, version in self._held:
            if version not in (-1, value._version):
                raise _changed()
            by_device.setdefault(value.device, []).append((value.reshape(()), weight))
        self._held.clear()
        for held in by_device.values():
            self._add_part(_weighted(*zip(*held, strict=True)))

    def part(self) -> torch.Tensor | None:
        """Give sum and weight of what was added up on a device, shape (2,); None if nothing was."""
        if self._held:
            self.fold()
        return self._part

    def _add_part(self, part: torch.Tensor) -> None:
        if self._part is None:
            self._part = part
        else:
            self._part = self._part + part.to(self._part.device, non_blocking=True)


def _weighted(values: Sequence[torch.Tensor], weights: Sequence[float | torch.Tensor]) -> torch.Tensor:
    """Return the sums of values times weights and of weights, shape (2,), on the values' device."""
    device = values[0].device
    # Apple's GPUs have no double precision.
    kind = torch.float32 if device.type == "mps" else torch.float64
    stacked = torch.stack(list(values)).to(kind)
    if any(isinstance(weight, torch.Tensor) for weight in weights):
        parts = [
            weight.detach().reshape(()).to(device=device, dtype=kind, non_blocking=True)
            if isinstance(weight, torch.Tensor)
            else stacked.new_full((), weight)
            for weight in weights
        ]
        factors = torch.stack(parts)
    else:
        factors = send(torch.tensor(weights, dtype=kind), device)
    # A weight of nothing counts for nothing, whatever the value, NaN included.
    counted = torch.where(factors > 0, stacked * factors, 0.0)
    return torch.stack([counted.sum(), factors.sum()])


def send(box: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the CPU to a device without waiting for it."""
    if device.type == "cuda":
        box = box.pin_memory()
    return box.to(device, non_blocking=True)


def pack(sums: dict[str, Sums], names: Sequence[str], device: torch.device) -> torch.Tensor:
    """Write sums as one tensor, so that all of them are one message.

    Args:
        sums: of each metric.
        names: what the rows stand for, in this order.
        device: where to write it. If it is the CPU, what is on another device is read, once for all.

    Returns:
        Shape (names + 1, 2), float64: sums and weights; the last row has a 1 if ``sums`` has other names as well.
    """
    rows = [(sums[name].total, sums[name].weight) if name in sums else (0.0, 0.0) for name in names]
    box = torch.tensor([*rows, (float(not sums.keys() <= set(names)), 0.0)], dtype=torch.float64)
    parts = [sums[name].part() if name in sums else None for name in names]
    first = next((part for part in parts if part is not None), None)
    if first is None:
        return send(box, device)
    nothing = first.new_zeros(2)
    there = torch.stack([nothing if part is None else part.to(first.device) for part in (*parts, None)])
    if device.type == "cpu":
        return box + there.to(device=device, dtype=torch.float64)
    return send(box, device) + there


def plain_rows(sums: dict[str, Sums]) -> list[tuple[float, float]] | None:
    """Return sums and weights as numbers, if nothing is on a device; else None."""
    if any(held.part() is not None for held in sums.values()):
        return None
    return [(held.total, held.weight) for held in sums.values()]


def merge(sums: dict[str, Sums], fresh: dict[str, Sums]) -> None:
    """Add the sums in ``fresh`` to those in ``sums``."""
    for name, new in fresh.items():
        known = sums.get(name)
        if known is None:
            known = sums[name] = Sums()
        known.total += new.total
        known.weight += new.weight
        if (part := new.part()) is not None:
            known._add_part(part)


def means(names: Iterable[str], rows: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return the means of those metrics that anything was logged for."""
    return {name: total / weight for name, (total, weight) in zip(names, rows, strict=True) if weight > 0}


def _changed() -> RankError:
    return RankError(
        "a tensor was written to after it had been logged",
        why="ctx.metrics.log() reads a tensor on a GPU later, so that the GPU need not be waited for",
        fix="log a copy: ctx.metrics.log(loss=loss.detach().clone())",
    )
