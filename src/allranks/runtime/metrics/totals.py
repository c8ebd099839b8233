"""Sums over all ranks: one message for all metrics, also where ranks have logged different ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed

from allranks.runtime.metrics.sums import Sums, pack

if TYPE_CHECKING:
    from allranks.runtime.context import Context


class Totals:
    """Adds sums up over all ranks.

    Args:
        ctx: the rank, and the ways to the other ranks.

    Attributes:
        names: what the rows of a message stand for: the same on all ranks.
        agreed: whether no rank is known to have other names.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.names: list[str] = []
        self.agreed = False

    def reduce(self, *several: dict[str, Sums]) -> list[list[list[float]]]:
        """Add sums up over all ranks; where a rank has a new name, the ranks agree on names first."""
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
        """Let all ranks know the names that any of them has."""
        new = dict.fromkeys(name for sums in several for name in sums if name not in self.names)
        told = self._ctx.control.gather(list(new))
        self.names += dict.fromkeys(name for names in told for name in names)
        self.agreed = True
