"""Model, optimizer and step; this module has the forward and backward pass, with accumulation and scaling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from allranks.errors import RankError
from allranks.runtime.model.accumulation import Accumulation, weight
from allranks.runtime.model.flat_gradients import unwrap
from allranks.runtime.model.optimizer import Managed
from allranks.runtime.model.wrappers import DTYPES
from allranks.runtime.steptime import COMPUTE

if TYPE_CHECKING:
    from torch import nn

    from allranks.runtime.context import Context
    from allranks.runtime.progress import Progress

__all__ = ["accumulate_block", "autocast_block", "run_backward", "unwrap"]

_NOTHING: AbstractContextManager[Any] = nullcontext()


def autocast_block(ctx: Context) -> AbstractContextManager[Any]:
    """Return a ``with`` block in which torch computes in the context's precision; it does nothing with fp32."""
    return _NOTHING if ctx.precision == "fp32" else torch.autocast(ctx.device.type, DTYPES[ctx.precision])


def run_backward(ctx: Context, loss: torch.Tensor) -> None:
    """Compute the gradients of a loss that is a mean over this rank's micro-batch.

    It weights the loss so that the gradients are the mean over all samples of the effective batch, even if ranks
    and micro-batches have different sizes, and scales it with fp16. If all batches have the same size and there
    is neither accumulation nor fp16, ``loss.backward()`` does the same; otherwise ``optimizer.step()`` refuses it.

    Args:
        loss: a tensor of one number.
    """
    ctx.metrics.start_step()
    progress = ctx.progress
    progress.clock.enter(COMPUTE)
    progress.start_backward()
    factor = weight(progress, ctx.world_size)
    if factor != 1.0:
        loss = loss * factor
    if progress.is_boundary:
        progress.weighed += 1
    if ctx.precision != "fp16":
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        ctx.scaler.scale(loss).backward()


def accumulate_block(ctx: Context, model: nn.Module, steps: int) -> AbstractContextManager[None]:
    """Return a ``with`` block for the forward and backward pass of one of ``steps`` micro-batches.

    Ranks exchange gradients in the last micro-batch only. The last effective batch of an epoch ends with the epoch,
    so it may have fewer micro-batches.

    If the loop leaves an effective batch early, for example by ``break``, the next blocks complete it. Its
    gradients are dropped instead when the :class:`Loader` starts the next epoch or loads a state, or when a block
    with other ``steps`` starts. A block that an exception leaves counts as a micro-batch.

    Args:
        model: the result of :meth:`prepare`.
        steps: number of micro-batches in an effective batch.

    Raises:
        RankError: ``steps`` is not a positive number.
    """
    ctx.metrics.start_step()
    progress = ctx.progress
    groups = progress.groups
    made = groups.get((id(model), steps))  # The same object each time.
    if made is None:
        if not isinstance(steps, int) or steps < 1:
            raise RankError(f"invalid number of micro-batches: steps={steps!r}", fix="give a whole number from 1 on")
        if not groups:
            hook = register_optimizer_step_pre_hook(partial(_check_foreign, progress))
            ctx.closing.append(hook.remove)
        full = progress.full
        if full is not None and steps > 1 and all(known == 1 for _, known in groups):
            ctx.print(f"effective batch: {full * steps} samples a step ({steps} micro-batches of {full})")
        made = groups[id(model), steps] = Accumulation(progress, model, steps)
    return made


def _check_foreign(progress: Progress, optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise if the script's own optimizer steps between micro-batches, on gradients that are not averaged yet."""
    if isinstance(optimizer, Managed) or progress.is_boundary:
        return
    taken = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for one in progress.groups.values():
        if one.unfinished and one.trains(taken):
            raise RankError(
                "optimizer.step() between the micro-batches of ctx.accumulate",
                why="ranks average gradients in the last micro-batch; a step before it makes their models differ",
                fix=f"ctx.optimizer(torch.optim.{type(optimizer).__name__}, ...), or step only after the last "
                "micro-batch (ctx.progress.is_boundary)",
            )
