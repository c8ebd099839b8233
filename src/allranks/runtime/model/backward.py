"""The forward and backward pass: precision, scaling, and gradient accumulation with the weight of each micro-batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from allranks.errors import RankError
from allranks.runtime.model.wrappers import DTYPES, is_sharded, unsent
from allranks.runtime.steptime import COMPUTE

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn

    from allranks.runtime.context import Context
    from allranks.runtime.progress import Progress

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
    if hasattr(optimizer, "_around") or progress.is_boundary:
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


def weight(progress: Progress, world_size: int) -> float:
    """Return the factor for a mean loss that makes the averaged gradient the mean over the effective batch.

    Ranks average: the sum over ranks r and micro-batches m of w(r, m) g(r, m) / R has to be the sum of
    n(r, m) g(r, m) / N, with n samples of N in all. So w = R n / N. It is 1 if all batches have the same size and
    there is no accumulation. Without a loader, which knows the sizes, micro-batches have equal weight.
    """
    samples, total, steps = progress.samples, progress.total, progress.accumulation
    if samples is None or total is None:
        return 1.0 / steps
    return world_size * samples / (total if steps == 1 else _samples_in_group(progress, total))


def _samples_in_group(progress: Progress, total: int) -> int:
    """Count the samples of the effective batch over all ranks; only the last batch of an epoch may be smaller."""
    full = total if progress.full is None else progress.full
    if progress.is_boundary:
        return full * progress.micro + total
    ends_epoch = progress.left is not None and progress.left == progress.accumulation - 1 - progress.micro
    last = full if progress.last is None or not ends_epoch else progress.last
    return full * (progress.accumulation - 1) + last


class Accumulation:
    """A block around the forward and backward pass of one micro-batch. One object serves the whole training.

    Ranks average only in the last micro-batch. The last effective batch of an epoch ends with the epoch; an incomplete
    one is dropped when another number of micro-batches or another epoch starts.
    """

    __slots__ = ("_progress", "_quiet", "_sharded", "_size", "_steps", "_synchronises", "_turn", "model")

    def __init__(self, progress: Progress, model: nn.Module, steps: int) -> None:
        self._progress = progress
        self.model: Any = model
        self._steps = steps
        self._size = 0
        self._turn = 0
        self._sharded = is_sharded(model)
        self._synchronises = hasattr(model, "require_backward_grad_sync") or self._sharded
        self._quiet = False

    @property
    def unfinished(self) -> bool:
        """Whether gradients wait for further micro-batches."""
        return self._turn + 1 < self._size

    def words(self) -> str:
        """Return the position as text: ``micro-batch 1 of 4``."""
        return f"micro-batch {self._turn + 1} of {self._size}"

    def trains(self, parameters: Collection[int]) -> bool:
        """Return whether some of these parameters, given by their ``id``, are the model's."""
        return any(id(parameter) in parameters for parameter in self.model.parameters())

    def abandon(self) -> None:
        """Drop the gradients of an incomplete effective batch; the next block starts a new one."""
        if self.unfinished:
            for holder, name in self._gradients():
                setattr(holder, name, None)
        self._turn = self._size = 0

    def __enter__(self) -> None:
        """Set the index of the micro-batch; disable averaging unless it is the last one."""
        progress = self._progress
        self._turn += 1
        if self._turn >= self._size:
            self._turn = 0
            for other in progress.groups.values():
                if other is not self and other.model is self.model:
                    other.abandon()
            left = progress.left
            self._size = self._steps if left is None or left >= self._steps else left + 1
        elif progress.left == 0 and self.unfinished:
            self._end_with_epoch()
        progress.clock.enter(COMPUTE)
        progress.open += 1
        progress.blocks += 1
        progress.micro = self._turn
        progress.accumulation = self._size
        if self._synchronises and self.unfinished and not getattr(self.model, "must_average", False):
            self._quiet = True
            self._synchronise(False)

    def __exit__(self, *_: object) -> None:
        """Let ranks average again."""
        self._progress.open -= 1
        if self._quiet:
            self._quiet = False
            self._synchronise(True)

    def _end_with_epoch(self) -> None:
        """Complete the effective batch of a stream that ended earlier than expected.

        Its gradients were weighted for more samples, so they are rescaled; no rank has sent them yet.
        """
        progress, assumed = self._progress, self._size
        self._size = self._turn + 1
        factor = assumed / self._size
        if progress.total is not None:
            full = progress.total if progress.full is None else progress.full
            factor = full * assumed / (full * self._turn + progress.total)
        gradients = [tensor for place in self._gradients() if (tensor := getattr(*place)) is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _gradients(self) -> list[tuple[Any, str]]:
        """Return where the accumulated gradients are: objects, and the names of their attributes."""
        return unsent(self.model) if self._sharded else [(parameter, "grad") for parameter in self.model.parameters()]

    def _synchronise(self, wanted: bool) -> None:
        if self._sharded:
            self.model.set_requires_gradient_sync(wanted)
        else:
            self.model.require_backward_grad_sync = wanted
