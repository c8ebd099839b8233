"""What the context keeps for the model and its steps."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from allranks.errors import RankError
from allranks.runtime.model import precision
from allranks.runtime.model.optimizer_factory import Asked, make_optimizer
from allranks.runtime.model.optimizing import Managed
from allranks.runtime.model.preparing import Options, prepare
from allranks.runtime.model.weighing import Accumulation, weight

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from allranks.runtime.context import Context
    from allranks.runtime.model.optimizer_factory import AnyOptimizer


class Training:
    """The model, optimizer and step of one context; :class:`Context` has a method for each.

    Args:
        ctx: the context.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._progress = ctx.progress
        self._world_size = ctx.world_size
        self._plain = ctx.precision != "fp16"
        self._optimizers = 0

    def prepare(self, module: nn.Module, options: Options) -> nn.Module:
        """Place a model and make it data parallel."""
        return prepare(self._ctx, module, options)

    def optimizer(self, cls: AnyOptimizer, what: nn.Module | Iterable[Any], asked: Asked) -> Any:
        """Make an optimizer; the first one of a context counts the steps."""
        made = make_optimizer(self._ctx, cls, what, asked, counts=self._optimizers == 0)
        self._optimizers += 1
        return made

    @cached_property
    def scaler(self) -> precision.Scaler:
        """The scaler of gradients; one that does nothing unless the precision is fp16."""
        return precision.Scaler(self._ctx.device.type, enabled=not self._plain)

    def autocast(self) -> AbstractContextManager[Any]:
        """Give a block that computes in the precision of the context."""
        return precision.autocast(self._ctx.device, self._ctx.precision)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a loss that is a mean over the micro-batch."""
        progress = self._progress
        progress.begin_backward()
        factor = weight(progress, self._world_size)
        if factor != 1.0:
            loss = loss * factor
        if progress.micro + 1 >= progress.accumulation:
            progress.weighed += 1
        if self._plain:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self.scaler.scale(loss).backward()

    def accumulate(self, model: nn.Module, steps: int) -> Accumulation:
        """Give the block for one micro-batch; the same object each time.

        Raises:
            RankError: ``steps`` is no positive number.
        """
        groups = self._progress.groups
        made = groups.get((id(model), steps))
        if made is None:
            if not isinstance(steps, int) or steps < 1:
                raise RankError(f"ctx.accumulate(model, steps={steps!r})", fix="a number of micro-batches, 1 or more")
            if not groups:
                self._ctx.closing.append(register_optimizer_step_pre_hook(self._check_foreign).remove)
            if steps > 1 and all(known == 1 for _, known in groups):
                self._say_size(steps)
            made = groups[id(model), steps] = Accumulation(self._progress, model, steps)
        return made

    def _say_size(self, steps: int) -> None:
        """Print how many samples an optimizer step takes, where a loader says how large a batch is."""
        full = self._progress.full
        if full is not None:
            self._ctx.print(f"effective batch: {full * steps} samples a step ({steps} micro-batches of {full})")

    def _check_foreign(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Check that an optimizer of the script's own does not take gradients that are not complete.

        Raises:
            RankError: they are this rank's own, of some micro-batches.
        """
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
