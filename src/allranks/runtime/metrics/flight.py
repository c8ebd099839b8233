"""Means on their way: added up over all ranks and brought to the host while the training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


class Flight:
    """Sums of one record, while they are added up over all ranks. All ranks start it at the same point.

    With NCCL everything happens on the GPU, in order with what else it does, and the result is copied to the host
    when the GPU is there. With gloo a thread of gloo's does it.

    Args:
        step: that the record is of.
        names: of the rows.
        box: what :func:`~allranks.runtime.metrics.sums.pack` gave; on the GPU if it is for NCCL.
        group: where to add up; None in a world of one.
        extra: what is written beside the means.
        when: the time of the step, in seconds since 1970.
    """

    def __init__(
        self,
        step: int,
        names: list[str],
        box: torch.Tensor,
        group: ProcessGroup | None,
        extra: dict[str, float],
        when: float,
    ) -> None:
        self.step = step
        self.names = names
        self.extra = extra
        self.when = when
        self._box = box
        self._work: Work | None = None
        self._copied: torch.cuda.Event | None = None
        if group is not None:
            self._work = distributed.all_reduce(box, group=group, async_op=True)
        if box.is_cuda:
            self._copy()

    def _copy(self) -> None:
        if self._work is not None:
            self._work.wait()  # The GPU waits, not the host.
        host = torch.empty(self._box.shape, dtype=self._box.dtype, pin_memory=True)
        host.copy_(self._box, non_blocking=True)
        self._box, self._work = host, None
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def done(self) -> bool:
        """Tell whether :meth:`rows` would give its answer at once."""
        if self._copied is not None:
            return bool(self._copied.query())  # type: ignore[no-untyped-call]
        return self._work is None or self._work.is_completed()

    def rows(self) -> list[list[float]]:
        """Give sums and weights over all ranks, the last row as :func:`pack` says; waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        elif self._work is not None:
            self._work.wait()
            self._work = None
        rows: list[list[float]] = self._box.tolist()
        return rows
