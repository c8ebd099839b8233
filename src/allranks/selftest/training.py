"""Trains a small model on all ranks together, and on each rank alone: the results must be equal.

It uses float64, whose precision no setting reduces. Containers and sites may make GPUs multiply float32 as TF32, and
then ranks that each process a part of a batch get other results than one that processes the complete batch.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from allranks.record.selftest import TrainingResult
from allranks.selftest.collectives import synchronize

if TYPE_CHECKING:
    from allranks.runtime.context import Context

_STEPS = 20
_PER_RANK, _INPUTS, _HIDDEN = 8, 32, 64
_RATE = 0.1
_EXACT = torch.float64

Strategy = Literal["auto", "ddp", "flat"]


def train(ctx: Context, strategy: Strategy) -> TrainingResult:
    """Train some steps with a data-parallel strategy; collective."""
    inputs, targets = _batch(ctx)
    mine = slice(ctx.rank * _PER_RANK, (ctx.rank + 1) * _PER_RANK)
    # Each rank starts with different weights: all must get those of rank 0.
    model = ctx.prepare(_model(ctx, ctx.rank), strategy=strategy)
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=_RATE)
    losses, seconds = _together(model, optimizer, inputs[mine], targets[mine])
    means = [total / ctx.world_size for total in ctx.sum(*losses)]
    by_itself = _alone(_model(ctx, 0), inputs, targets)
    bits = hashlib.sha256()
    for weights in model.parameters():
        bits.update(bytes(weights.detach().cpu().contiguous().view(torch.uint8).flatten().tolist()))
    rate = (_STEPS - 1) / seconds
    return TrainingResult(ctx.rank, strategy, tuple(means), tuple(by_itself), bits.hexdigest()[:16], rate)


def _batch(ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of all ranks, the same on each rank."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ctx.world_size * _PER_RANK, _INPUTS, generator=generator)
    targets = inputs[:, :1] * inputs[:, 1:2] + inputs[:, 2:3]
    return inputs.to(ctx.device, _EXACT), targets.to(ctx.device, _EXACT)


def _model(ctx: Context, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(_INPUTS, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, 1))
    with torch.no_grad():
        for weights in model.parameters():
            weights.copy_(torch.randn(weights.shape, generator=generator) / 8)
    return model.to(ctx.device, _EXACT)


def _together(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[list[float], float]:
    """Train; return the loss of each step, and the seconds of all steps but the first, which includes the set-up."""
    losses, began = [], 0.0
    for step in range(_STEPS):
        if step == 1:
            synchronize(inputs.device)
            began = time.perf_counter()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize(inputs.device)
    seconds = time.perf_counter() - began
    return [float(loss) for loss in losses], seconds


def _alone(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """Train in this process only, by the plain update formula; return the loss of each step."""
    losses, weights = [], [*model.parameters()]
    for _ in range(_STEPS):
        loss = nn.functional.mse_loss(model(inputs), targets)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(gradient, alpha=_RATE)
        losses.append(loss.detach())
    return [float(loss) for loss in losses]
