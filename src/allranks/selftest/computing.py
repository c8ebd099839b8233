"""Whether ranks compute correctly: a small model that they train together and alone, and matrix products on a GPU.

The training uses float64, whose precision no setting reduces. Containers and sites may make GPUs multiply float32 as
TF32, and then ranks that each process a part of a batch get other results than one that processes the complete batch.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from allranks.record.selftest import TrainingResult
from allranks.selftest.collectives import synchronize

if TYPE_CHECKING:
    from allranks.runtime.context import Context

_STEPS = 20
_PER_RANK, _INPUTS, _HIDDEN = 8, 32, 64
_LEARNING_RATE = 0.1
_EXACT = torch.float64

Strategy = Literal["auto", "ddp", "flat"]


def train(ctx: Context, strategy: Strategy) -> TrainingResult:
    """Train some steps with a data-parallel strategy; collective."""
    inputs, targets = _batch(ctx)
    mine = slice(ctx.rank * _PER_RANK, (ctx.rank + 1) * _PER_RANK)
    # Each rank starts with different weights: all must get those of rank 0.
    model = ctx.prepare(_model(ctx, ctx.rank), strategy=strategy)
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=_LEARNING_RATE)
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
                weight.sub_(gradient, alpha=_LEARNING_RATE)
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


# --- products on a GPU ---

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: The first major version of compute capability with bf16.
_HAS_BF16 = 8
#: Rows of the matrices: enough to keep a GPU busy, and little of its memory (200 MB).
_SIZE, _SIZE_OF_CPU = 4096, 256
#: Seconds of computing, to reach the clock of long work; the result is checked before and after.
_SECONDS, _AT_ONCE = 0.25, 8
#: Number of terms of each sum that do not cancel out.
_LEFT = 4


def measure_products(device: torch.device) -> dict[str, Any]:
    """Multiply matrices on a device, and compare the result with the exact product.

    Returns:
        ``index`` of the device, its ``name``, its ``capability`` and the architectures that torch was built for; None
        for a CPU. For each precision that it can compute in: ``wrong`` of ``values`` of the product are wrong, and
        ``tflops``: 10^12 operations a second; or ``error``: why it could not.
    """
    found = {"index": device.index, **_build(device)}
    return {**found, **{name: _tried(device, _PRECISIONS[name]) for name in precisions(found)}}


def precisions(build: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the precisions that a device supports, by its compute capability and torch's build.

    GPUs before compute capability 8.0 have no native bf16, and the oldest reject it.
    """
    capability = build["capability"]
    if not capability:
        return (*_PRECISIONS,)
    if not is_built_for(capability, build["arches"]):
        return ()
    return (*_PRECISIONS,) if int(capability.split(".")[0]) >= _HAS_BF16 else ("fp32",)


def is_built_for(capability: str, arches: Sequence[str]) -> bool:
    """Return True if code for one of these architectures runs on a GPU of this compute capability.

    Binary code (``sm_80``) runs on the same major version, from its minor version on; PTX (``compute_80``) from its
    version on; architectures with an ``a`` only on exactly that version.
    """
    has = tuple(map(int, capability.split(".")))
    for arch in arches:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if not match:
            continue
        kind, needs, special = match[1], (int(match[2]), int(match[3])), match[4]
        is_near = has == needs if special == "a" else has >= needs
        if is_near and ((kind == "compute" and not special) or has[0] == needs[0]):
            return True
    return False


def _build(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": device.type, "capability": None, "arches": None}
    capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    if torch.version.hip:  # AMD's architectures have other names.
        capability = ""
    return {"name": torch.cuda.get_device_name(device), "capability": capability, "arches": torch.cuda.get_arch_list()}


def _matrices(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two matrices of small integers whose product is exact in any order of summation, and that product.

    The matrices are outer products: ``left[i, k] = u[i] s[k]`` and ``right[k, j] = s[k] w[k] v[j]``, where s is 1 or
    -1, and w alternates between 1 and -1 except for the last terms, which remain: no sum of neighbours exceeds their
    number times 9, which bf16 holds exactly.
    """
    generator = torch.Generator().manual_seed(1)
    u, v = (torch.tensor([-3.0, -2, -1, 1, 2, 3])[torch.randint(6, (size,), generator=generator)] for _ in range(2))
    s = torch.tensor([-1.0, 1])[torch.randint(2, (size,), generator=generator)]
    w = 1.0 - 2.0 * (torch.arange(size) % 2)
    w[-_LEFT:] = 1.0
    return torch.outer(u, s), torch.outer(s * w, v), _LEFT * torch.outer(u, v)


def _tried(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    size = _SIZE if device.type == "cuda" else _SIZE_OF_CPU
    try:
        left, right, expected = _matrices(size)
        left, right = left.to(device, dtype), right.to(device, dtype)
        cold = _count_wrong(left @ right, expected)
        rate = _rate(lambda: left @ right, device)
        wrong = max(cold, _count_wrong(left @ right, expected))
    except RuntimeError as error:  # CUDA errors and out-of-memory errors are of this class.
        return {"error": str(error).splitlines()[0]}
    return {"wrong": wrong, "values": size * size, "tflops": rate * 2 * size**3 / 1e12}


def _count_wrong(product: torch.Tensor, expected: torch.Tensor) -> int:
    """Count the wrong values on the CPU, which is not under test."""
    return int((product.float().cpu() != expected).sum())


def _rate(work: Callable[[], object], device: torch.device) -> float:
    """Return how often per second a device completes ``work``."""
    done, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < _SECONDS:
        for _ in range(_AT_ONCE):
            work()
        synchronize(device)
        done += _AT_ONCE
    return done / passed
