"""The model, its optimizer and the step: placed, made data parallel, accumulated and scaled so that it is right."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from allranks.errors import RankError
from allranks.runtime.model.accumulation import Accumulation, weight
from allranks.runtime.model.flat import unwrap
from allranks.runtime.model.optimizer import Managed, Scaler, make_optimizer
from allranks.runtime.model.wrappers import DTYPES
from allranks.runtime.steptime import COMPUTE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from allranks.runtime.context import Context
    from allranks.runtime.model.optimizer import AnyOptimizer

__all__ = ["TrainingState", "unwrap"]

_NOTHING: AbstractContextManager[Any] = nullcontext()


class TrainingState:
    """The optimizers and steps of one context; :class:`Context` has a method for each."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._progress = ctx.progress
        self._world_size = ctx.world_size
        self._plain = ctx.precision != "fp16"
        self._optimizers = 0

    def optimizer(self, cls: AnyOptimizer, what: nn.Module | Iterable[Any], **requested: Any) -> Any:
        """Make an optimizer, see :func:`make_optimizer`; the first one of a context counts the steps."""
        made = make_optimizer(self._ctx, cls, what, counts_steps=self._optimizers == 0, **requested)
        self._optimizers += 1
        return made

    @cached_property
    def scaler(self) -> Scaler:
        """The scaler of gradients; one that does nothing unless the precision is fp16."""
        return Scaler(self._ctx.device.type, enabled=not self._plain)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a block in which torch computes in the context's precision where that is safe."""
        precision = self._ctx.precision
        return _NOTHING if precision == "fp32" else torch.autocast(self._ctx.device.type, DTYPES[precision])

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a loss that is a mean over the micro-batch."""
        progress = self._progress
        progress.clock.enter(COMPUTE)
        progress.start_backward()
        factor = weight(progress, self._world_size)
        if factor != 1.0:
            loss = loss * factor
        if progress.is_boundary:
            progress.weighed += 1
        if self._plain:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self.scaler.scale(loss).backward()

    def accumulate(self, model: nn.Module, steps: int) -> Accumulation:
        """Return the block for one micro-batch; the same object each time."""
        groups = self._progress.groups
        made = groups.get((id(model), steps))
        if made is None:
            if not isinstance(steps, int) or steps < 1:
                raise RankError(
                    f"invalid number of micro-batches: steps={steps!r}", fix="give a whole number from 1 on"
                )
            if not groups:
                self._ctx.closing.append(register_optimizer_step_pre_hook(self._check_foreign).remove)
            full = self._progress.full
            if full is not None and steps > 1 and all(known == 1 for _, known in groups):
                self._ctx.print(f"effective batch: {full * steps} samples a step ({steps} micro-batches of {full})")
            made = groups[id(model), steps] = Accumulation(self._progress, model, steps)
        return made

    def _check_foreign(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise if an optimizer of the script's own takes gradients of this rank alone, of some micro-batches."""
        if isinstance(optimizer, Managed) or self._progress.is_boundary:
            return
        taken = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for one in self._progress.groups.values():
            if one.unfinished and one.trains(taken):
                raise RankError(
                    "optimizer.step() between the micro-batches of ctx.accumulate",
                    why="ranks average gradients in the last micro-batch; a step before it makes their models differ",
                    fix=f"ctx.optimizer(torch.optim.{type(optimizer).__name__}, ...), or step only after the last "
                    "micro-batch (ctx.progress.is_boundary)",
                )
