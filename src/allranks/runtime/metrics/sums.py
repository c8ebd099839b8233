"""Weighted sums of metrics: kept on the device of the values, read as late as possible, and reduced over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed

from allranks.errors import RankError

if TYPE_CHECKING:
    from allranks.runtime.context import Context

#: Most values on a device to hold before they are summed there by a few operations.
_HELD = 64
#: Bytes of the largest scalar.
_ONE = 16


class Sums:
    """The weighted sum of one metric, and the sum of the weights.

    Numbers and CPU tensors are summed immediately, in double precision. Reading a tensor on another device would block
    the host, so these are held and summed by the device.
    """

    __slots__ = ("_held", "_part", "total", "weight")

    def __init__(self, total: float = 0.0, weight: float = 0.0) -> None:
        self.total = total
        self.weight = weight
        #: Value, weight and version of the value, which changes if the tensor is modified in place.
        self._held: list[tuple[torch.Tensor, float | torch.Tensor, int]] = []
        #: Sum and weight on a device, shape (2,).
        self._part: torch.Tensor | None = None

    def hold(self, value: torch.Tensor, weight: float | torch.Tensor) -> None:
        """Take a tensor of one number on a device other than the CPU."""
        value = value.detach()
        counted = not value.is_inference()
        # Copy tensors without a version counter, and views, which would keep a large storage alive.
        if not counted or value.untyped_storage().nbytes() > _ONE:
            value = value.clone()
        if len(self._held) >= _HELD or (self._held and self._held[0][0].device != value.device):
            self.fold()
        self._held.append((value, weight, value._version if counted else -1))

    def fold(self) -> None:
        """Sum the held values on their device, without waiting for it."""
        for value, _, version in self._held:
            if version not in (-1, value._version):
                raise RankError(
                    "a tensor was written to after it had been logged",
                    why="ctx.metrics.log() reads a tensor on a GPU later, so that the GPU need not be waited for",
                    fix="log a copy: ctx.metrics.log(loss=loss.detach().clone())",
                )
        values, weights = [value.reshape(()) for value, _, _ in self._held], [weight for _, weight, _ in self._held]
        self._held.clear()
        self._add_part(_weighted(values, weights))

    def part(self) -> torch.Tensor | None:
        """Return sum and weight on a device, shape (2,); None if there are none."""
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
    # With weight 0 no value counts, NaN included.
    counted = torch.where(factors > 0, stacked * factors, 0.0)
    return torch.stack([counted.sum(), factors.sum()])


def send(box: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device without waiting for it."""
    if device.type == "cuda":
        box = box.pin_memory()
    return box.to(device, non_blocking=True)


def pack(sums: dict[str, Sums], names: Sequence[str], device: torch.device) -> torch.Tensor:
    """Pack sums into one tensor, so that they travel in one message.

    Args:
        sums: of each metric.
        names: names of the rows, in this order.
        device: device of the result. If it is the CPU, sums on another device are read in one transfer.

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
        return box + there.cpu()
    return send(box, device) + there


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
    """Return the means of the metrics that have values."""
    return {name: total / weight for name, (total, weight) in zip(names, rows, strict=True) if weight > 0}


class Totals:
    """Reduces sums over all ranks in one message for all metrics, even if ranks have logged different ones.

    Attributes:
        names: names of the rows of a message, the same on all ranks.
        agreed: False once a rank is known to have other names.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.names: list[str] = []
        self.agreed = False

    def reduce(self, *several: dict[str, Sums]) -> list[list[list[float]]]:
        """Reduce sums over all ranks; if a rank has a new name, the ranks agree on names first."""
        box = self._added_up(several)
        if any(rows[-1][0] for rows in box):
            self.agree(*several)
            box = self._added_up(several)
        return [rows[:-1] for rows in box]

    def _added_up(self, several: tuple[dict[str, Sums], ...]) -> list[list[list[float]]]:
        box = torch.stack([pack(sums, self.names, torch.device("cpu")) for sums in several])
        if self._ctx.world_size > 1:
            distributed.all_reduce(box, group=self._ctx.control.group)
        boxes: list[list[list[float]]] = box.tolist()
        return boxes

    def agree(self, *several: dict[str, Sums]) -> None:
        """Collect the names that any rank has; all ranks call it."""
        new = dict.fromkeys(name for sums in several for name in sums if name not in self.names)
        gathered = self._ctx.control.gather(list(new))
        self.names += dict.fromkeys(name for names in gathered for name in names)
        self.agreed = True
