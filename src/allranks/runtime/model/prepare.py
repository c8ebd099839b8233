"""Makes the model of a script one that trains on all ranks, from the same weights."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from allranks.errors import RankError
from allranks.runtime.model.flat import Flat
from allranks.runtime.model.wrappers import (
    DTYPES,
    Buckets,
    PrepareOptions,
    Strategy,
    copy_from_first,
    matching,
    shard,
    trained,
)

if TYPE_CHECKING:
    from allranks.runtime.context import Context

#: Bytes of gradients up to which one message at the end is chosen on CPUs: measured up to half of it, with two ranks
#: on two cores. Beyond, sending while the rest is computed is the safer choice.
FLAT_LIMIT = 64 << 20


def prepare(ctx: Context, module: nn.Module, options: PrepareOptions) -> nn.Module:
    """Place a model and make it data parallel, with the weights of rank 0 on all ranks."""
    _check(module, options)
    module = module.to(ctx.device)
    if options.channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if ctx.world_size > 1:
        _check_same(ctx, module)
    if kinds := options.checkpoint_activations:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        # Keys of state_dict stay the same.
        apply_activation_checkpointing(module, check_fn=lambda part: isinstance(part, kinds))
    if options.compile:
        # In place, so that keys stay the same: the whole model or, before it is sharded, its shards.
        parts = matching(module, options.shard) if options.strategy == "fsdp" and options.shard else [module]
        for part in parts:
            part.compile(mode=options.compile if isinstance(options.compile, str) else None)
    if ctx.world_size == 1:
        return module
    strategy = _choose(ctx, module) if options.strategy == "auto" else options.strategy
    if strategy == "ddp":
        return Buckets(ctx, module, options)
    copy_from_first([*module.parameters(), *module.buffers()])
    return Flat(ctx, module, options) if strategy == "flat" else shard(ctx, module, options)


def _check(module: nn.Module, options: PrepareOptions) -> None:
    """Raise if the model cannot be trained so."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    if isinstance(module, (DataParallel, DistributedDataParallel, Flat)):
        raise RankError(
            f"ctx.prepare() was given a model that is wrapped already, in {type(module).__name__}",
            fix="give it the model itself; it wraps it",
        )
    kinds = {"auto", "ddp", "flat", "fsdp"}
    if options.strategy not in kinds:
        raise RankError(f"there is no strategy {options.strategy!r}", fix=f"one of {', '.join(sorted(kinds))}")
    if options.compress not in (None, *DTYPES):
        raise RankError(f"gradients cannot be compressed to {options.compress!r}", fix="one of bf16, fp16, None")
    if not trained(module):
        frozen = sum(1 for _ in module.parameters())
        raise RankError(
            f"the model, {type(module).__name__}, has no parameters to train",
            why=f"all its {frozen} parameters are frozen (requires_grad=False)" if frozen else "it has none at all",
            fix="use it as it is, without ctx.prepare(), after module.to(ctx.device)",
        )
    inside = [part for part in module.modules() if part is not module]
    for requested, classes in (("checkpoint_activations", options.checkpoint_activations), ("shard", options.shard)):
        for kind in classes:
            if not any(isinstance(part, kind) for part in inside):
                there = ", ".join(sorted({type(part).__name__ for part in inside})) or "it has none"
                raise RankError(
                    f"{requested}: the model has no {kind.__name__} inside",
                    why="it would do nothing",
                    fix=f"name classes of modules below the model itself: {there}",
                )


def _check_same(ctx: Context, module: nn.Module) -> None:
    """Check that all ranks made the same model, before a message of the wrong size is taken for another."""
    facts = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {'trained' if tensor.requires_grad else 'fixed'}"
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    ]
    digests = ctx.control.gather(hashlib.sha256("\n".join(facts).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everywhere = ctx.control.gather(facts)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, theirs = (sorted(set(everywhere[a]) - set(everywhere[b]))[:1] for a, b in ((0, other), (other, 0)))
    raise RankError(
        f"rank {other} made another model than rank 0",
        why=f"rank 0 has {' '.join(first) or 'nothing more'}; rank {other} has {' '.join(theirs) or 'nothing more'}",
        fix="build the model from values that are the same on all ranks",
    )


def _choose(ctx: Context, module: nn.Module) -> Strategy:
    """Choose flat where it is faster, or where its order of summing, which never changes, is needed."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in trained(module).values())
    sparse = any(getattr(part, "sparse", False) is True for part in module.modules())
    small = ctx.device.type == "cpu" and size <= FLAT_LIMIT
    return "flat" if (small or ctx.deterministic) and not sparse else "ddp"
