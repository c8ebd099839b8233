"""From a model as a script makes it to one that trains on all ranks, starting from the same weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from allranks.errors import RankError
from allranks.runtime.model.flat import Flat
from allranks.runtime.model.precision import DTYPES
from allranks.runtime.model.wrappers import copy_from_first, trained

if TYPE_CHECKING:
    from collections.abc import Callable

    from allranks.runtime.context import Context
    from allranks.runtime.progress import Progress

Strategy = Literal["auto", "ddp", "flat", "fsdp"]
#: Bytes of gradients up to which one message at the end is chosen on CPUs: measured up to half of it, with two ranks
#: on two cores. Beyond, sending while the rest is computed is the safer choice.
FLAT_LIMIT = 64 << 20


@dataclass(frozen=True)
class Options:
    """What ``ctx.prepare`` was asked for; see there."""

    strategy: Strategy = "auto"
    static_graph: bool = False
    find_unused_parameters: bool = False
    checkpoint_activations: tuple[type[nn.Module], ...] = ()
    compile: bool | str = False
    channels_last: bool = False
    compress: Literal["bf16", "fp16"] | None = None
    shard: tuple[type[nn.Module], ...] = ()


def prepare(ctx: Context, module: nn.Module, options: Options) -> nn.Module:
    """Place a model and make it data parallel."""
    _check(module, options)
    module = module.to(ctx.device)
    if options.channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if ctx.world_size > 1:
        _check_same(ctx, module)
    if options.checkpoint_activations:
        _checkpoint_activations(module, options.checkpoint_activations)
    if options.compile:
        _compile(module, options)
    if ctx.world_size == 1:
        return module
    return _spread(ctx, module, options)


def _check(module: nn.Module, options: Options) -> None:
    """Refuse what cannot be trained.

    Raises:
        RankError: it says what and why.
    """
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
    for asked, classes in (("checkpoint_activations", options.checkpoint_activations), ("shard", options.shard)):
        for kind in classes:
            if not any(isinstance(part, kind) for part in module.modules() if part is not module):
                raise RankError(
                    f"{asked}: the model has no {kind.__name__} inside",
                    why="it would do nothing",
                    fix=f"name classes of modules below the model itself: {_classes(module)}",
                )


def _classes(module: nn.Module) -> str:
    return ", ".join(sorted({type(part).__name__ for part in module.modules() if part is not module})) or "it has none"


def _check_same(ctx: Context, module: nn.Module) -> None:
    """Check that all ranks made the same model, before a message of the wrong size is taken for another.

    Raises:
        RankError: it names a rank and what differs first.
    """
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


def _checkpoint_activations(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> None:
    """Compute the activations inside these modules again in the backward pass; keys of state_dict stay the same."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(module, check_fn=lambda part: isinstance(part, classes))


def _compile(module: nn.Module, options: Options) -> None:
    """Compile in place, so that keys stay the same: the whole model or, before it is sharded, its shards."""
    from allranks.runtime.model.sharding import matching

    mode = options.compile if isinstance(options.compile, str) else None
    parts = matching(module, options.shard) if options.strategy == "fsdp" and options.shard else [module]
    for part in parts:
        part.compile(mode=mode)


def _spread(ctx: Context, module: nn.Module, options: Options) -> nn.Module:
    """Make the model data parallel, with the weights of rank 0 on all ranks."""
    compress = DTYPES.get(options.compress or "")
    strategy = _choose(ctx, module) if options.strategy == "auto" else options.strategy
    if strategy == "ddp":
        from allranks.runtime.model.buckets import make_buckets

        return make_buckets(
            module,
            ctx.device,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
            deterministic=ctx.deterministic,
            compress=compress,
            progress=ctx.progress,
        )
    copy_from_first([*module.parameters(), *module.buffers()])
    if strategy == "flat":
        alone = ctx.device.type == "cpu" and ctx.local_world_size == ctx.world_size
        return Flat(
            module,
            find_unused_parameters=options.find_unused_parameters,
            compress=compress,
            neighbours=ctx.control if alone else None,
            progress=ctx.progress,
        )
    from allranks.runtime.model.sharding import shard

    module.register_forward_pre_hook(_counter(ctx.progress))
    return shard(
        module,
        options.shard,
        ctx.world_size,
        ctx.device,
        narrow=DTYPES.get(ctx.precision),
        compress=compress,
        all_used=not options.find_unused_parameters,
    )


def _counter(progress: Progress) -> Callable[[nn.Module, object], None]:
    """Count steps of a sharded model by its forward passes, which wait for the other ranks already."""

    def count(module: nn.Module, _: object) -> None:
        if module.training and torch.is_grad_enabled() and (progress.is_boundary or not progress.open):
            progress.backwards += 1

    return count


def _choose(ctx: Context, module: nn.Module) -> Strategy:
    """Take one message where it is faster, and where its order of adding up, which never changes, is asked for."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in trained(module).values())
    sparse = any(getattr(part, "sparse", False) is True for part in module.modules())
    small = ctx.device.type == "cpu" and size <= FLAT_LIMIT
    return "flat" if (small or ctx.deterministic) and not sparse else "ddp"
