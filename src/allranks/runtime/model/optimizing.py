"""Optimizers of torch that know about micro-batches, ranks and scaled gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from allranks.errors import RankError
from allranks.runtime.model.flat import Flat
from allranks.runtime.model.weighing import weight
from allranks.runtime.model.wrappers import trained, unused, unwrap

if TYPE_CHECKING:
    from allranks.runtime.model.precision import Scaler
    from allranks.runtime.model.weighing import Accumulation
    from allranks.runtime.progress import Progress


@dataclass
class Around:
    """What an optimizer has to know of the training around it."""

    progress: Progress
    world_size: int
    rank: int
    scaler: Scaler | None
    model: nn.Module | None
    flat: Flat | None
    sharded: bool
    clip_norm: float | None
    counts: bool
    #: Whether to look for parameters without gradients.
    all_used: bool
    #: Whether the model counts its backward passes in the progress.
    counted: bool
    #: Of the metrics: writes what was logged, if it is time to.
    begin_step: Callable[[], None]
    #: What is trained, by ``id``.
    parameters: frozenset[int]
    #: Calls of ctx.backward, and backward passes of all ranks together, that were seen at the last step.
    weighed: int = 0
    backwards: int = 0
    #: Blocks of accumulation, and backward passes outside of them, that were seen when a step was last asked for.
    blocks: int = 0
    plain: int = 0
    #: Whether there was a step.
    stepped: bool = False
    #: Whether the gradients that there are went into a step.
    consumed: bool = False
    in_scaler: bool = False


class Managed(torch.optim.Optimizer):
    """The part of an optimizer that knows what surrounds a step; torch's own class does the step itself."""

    _around: Around
    #: The norm of all gradients together before they were clipped, on the device; None without clipping.
    grad_norm: Tensor | None = None

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make a step once the effective batch is complete; do nothing between its micro-batches.

        Raises:
            RankError: the gradients are not those of one effective batch.
        """
        around = self._around
        if around.in_scaler:
            return super().step(closure)
        progress = around.progress
        if _waits(around):
            progress.stepped = False
            return None
        if progress.weighed == around.weighed and closure is None:
            if around.stepped:
                _check_new(around)
            around.begin_step()  # What ctx.backward does otherwise.
            _check_plain_backward(around)
        around.weighed, around.backwards = progress.weighed, progress.backwards
        if around.flat is not None:
            _check_averaged(around.flat, closure)
        if around.all_used:
            _check_used(around)
        result = self._step(closure) if around.scaler is None else self._scaled_step(around.scaler)
        around.consumed = around.stepped = progress.stepped = True
        if around.counts:
            progress.step += 1
        return result

    step.hooked = True  # type: ignore[attr-defined] # Hooks run around the step of torch's class, once.

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        if self._around.clip_norm is not None:
            self.grad_norm = self._clip(self._around.clip_norm)
        return super().step(closure)

    def _scaled_step(self, scaler: Scaler) -> float | None:
        """Make a step with gradients that were scaled, unless they overflowed."""
        around = self._around
        if around.sharded:
            scaler.unscale_on_all_ranks(self)
        elif around.clip_norm is not None:
            scaler.unscale_(self)
        if around.clip_norm is not None:
            self.grad_norm = self._clip(around.clip_norm)
        around.in_scaler = True
        try:
            result: float | None = scaler.step(self)
        finally:
            around.in_scaler = False
        scaler.due = True
        return result

    def _clip(self, limit: float) -> Tensor:
        """Scale all gradients down so that their norm is at most ``limit``; return the norm before."""
        flat = self._around.flat
        if flat is None or len(self.param_groups) > 1:  # Another group was added since.
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            norm: Tensor = nn.utils.clip_grad_norm_(parameters, limit)
            return norm
        norms = [torch.linalg.vector_norm(part) for part in flat.gradients]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([n.float() for n in norms]))
        share = (limit / (norm + 1e-6)).clamp_(max=1.0)
        for part in flat.gradients:
            part.mul_(share)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, unless they wait for the rest of an effective batch.

        So it does not matter whether it is called before the backward pass or after the step. An effective batch that
        is full and was not taken for a step, as after an error, is forgotten.
        """
        around = self._around
        if not around.consumed and _adds_up(around):
            return
        around.consumed = False
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _own_unfinished(around: Around) -> list[Accumulation]:
    """Give the effective batches of the optimizer's parameters that wait for further micro-batches."""
    unfinished = [one for one in around.progress.groups.values() if one.unfinished]
    return [one for one in unfinished if one.model is around.model or one.trains(around.parameters)]


def _adds_up(around: Around) -> bool:
    """Whether gradients are being added up."""
    progress = around.progress
    if _own_unfinished(around):
        return True
    return progress.accumulation > 1 and (progress.open > 0 or not progress.is_boundary)


def _waits(around: Around) -> bool:
    """Whether gradients wait for further micro-batches.

    Raises:
        RankError: there are also those of a backward pass outside of ``accumulate``.
    """
    progress = around.progress
    own = _own_unfinished(around)
    if not own and progress.is_boundary:
        around.blocks, around.plain = progress.blocks, progress.plain
        return False
    left = around.blocks == progress.blocks and (around.plain != progress.plain or around.world_size == 1)
    around.blocks, around.plain = progress.blocks, progress.plain
    if not left:
        return True
    if own:
        raise _left_behind(own[0])
    progress.accumulation, progress.micro = 1, 0
    return False


def _left_behind(group: Accumulation) -> RankError:
    return RankError(
        f"optimizer.step() with an effective batch that was left after {group.words()}",
        why="its gradients would be added to those of a backward pass outside of ctx.accumulate",
        fix="finish it; or put that backward pass into ctx.accumulate(model, steps=1), which forgets what was left",
    )


def _check_new(around: Around) -> None:
    """Check that there was a backward pass since the last step; a script that is alone is not looked after.

    Raises:
        RankError: there was none.
    """
    # Parameters without their model may be averaged by the script itself; flat is looked at after this.
    watched = around.world_size > 1 and around.model is not None and around.flat is None and around.counted
    if watched and around.progress.backwards == around.backwards:
        raise RankError(
            "optimizer.step() without a backward pass since the last step",
            why="the same gradients would be applied twice",
            fix="call optimizer.step() once after each ctx.backward(loss)",
        )


def _check_plain_backward(around: Around) -> None:
    """Check that ``loss.backward()``, without the context, was right.

    Raises:
        RankError: it was not.
    """
    progress = around.progress
    fix = "ctx.backward(loss), not loss.backward()"
    if around.scaler is not None:
        why = "with fp16 the loss has to be scaled, or small gradients become zero"
    elif progress.accumulation > 1:
        why = f"gradients of {progress.accumulation} micro-batches are added up, and have to be divided"
    elif weight(progress, around.world_size) != 1.0:
        why = f"this rank has {progress.samples} of {progress.total} samples of the batch, not its even share"
    elif progress.last is not None and progress.last % around.world_size:
        why = f"the last batch of the epoch has {progress.last} samples for {around.world_size} ranks, no even shares"
        fix += ", or ctx.loader(..., drop_last=True)"
    else:
        return
    raise RankError("optimizer.step() without ctx.backward(loss)", why=why, fix=fix)


def _check_averaged(flat: Flat, closure: object) -> None:
    """Check that the gradients are those of all ranks.

    Raises:
        RankError: they are this rank's own.
    """
    if not flat.averaged and closure is None:
        raise RankError(
            "optimizer.step() with gradients that were not averaged over the ranks",
            why="no backward pass went through what the prepared model returned since the last step",
            fix='call the object that ctx.prepare() gave, not the model inside; where that cannot be, strategy="ddp"',
        )
    flat.averaged = False


def _check_used(around: Around) -> None:
    """Check that all parameters got gradients: in the first step, since torch's own check comes one step later.

    Of a sharded model, which torch does not look after, in each step.

    Raises:
        RankError: it names those that did not.
    """
    around.all_used = around.sharded
    assert around.model is not None
    missing = [name for name, parameter in trained(unwrap(around.model)).items() if parameter.grad is None]
    if missing:
        raise unused(missing, around.rank)
