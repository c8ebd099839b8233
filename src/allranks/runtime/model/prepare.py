"""Makes a script's model data parallel, with the same initial weights on all ranks."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from allranks.errors import RankError
from allranks.runtime.model.flat_gradients import Flat
from allranks.runtime.model.optimizer import mark
from allranks.runtime.model.wrappers import DTYPES, Buckets, copy_from_first, matching, shard_model, trained

if TYPE_CHECKING:
    from collections.abc import Iterable

    from allranks.runtime.context import Context

#: Bytes of gradients up to which "auto" chooses one message at the end on CPUs. Measured up to half of it, with two
#: ranks on two cores; beyond, sending during the backward pass is safer.
FLAT_LIMIT = 64 << 20


def prepare_model(
    ctx: Context,
    module: nn.Module,
    *,
    strategy: Literal["auto", "ddp", "flat", "fsdp"] = "auto",
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    checkpoint_activations: Iterable[type[nn.Module]] = (),
    compile: bool | str = False,
    channels_last: bool = False,
    compress: Literal["bf16", "fp16"] | None = None,
    shard: Iterable[type[nn.Module]] = (),
) -> nn.Module:
    """Move a model to this rank's device and make it data parallel, with rank 0's weights on all ranks.

    With every strategy, ``loss.backward()`` averages the gradients over the ranks. In a world of one rank the model
    itself is returned.

    Args:
        module: the model, built the same way on all ranks.
        strategy: ``"flat"`` keeps all gradients in one buffer; it averages large ones as soon as they are computed
            and all others in one message at the end of the backward pass. ``"ddp"`` is torch's
            DistributedDataParallel with gradients as views of its buckets. ``"fsdp"`` is torch's fully_shard, for
            models whose gradients and optimizer state do not fit beside the parameters; the parameters alone must
            fit on each device at the start. ``"auto"`` is flat on CPUs up to 64 MiB of gradients and if
            ``deterministic``; otherwise, and for sparse gradients, ddp.
        static_graph: for ddp: each step uses the same parameters in the same order; some may never be used. No
            effect with other strategies or if ``deterministic``.
        find_unused_parameters: allow parameters without a gradient in some steps, as in models with branches.
            Those that no rank used keep ``grad=None``. If False, several ranks fail with an error that names
            them. With fsdp, all ranks must use the same parameters in the same step, or torch fails or hangs.
        checkpoint_activations: classes of modules whose activations are recomputed in the backward pass instead of
            kept: less memory, about a third more computation.
        compile: compile the model in place with ``torch.compile``: True, or a mode such as ``"max-autotune"``.
        channels_last: use the channels-last memory format, which is faster for convolutions of 4-D inputs.
        compress: send gradients in this type. It halves the traffic and rounds the gradients.
        shard: for fsdp: classes of modules that are gathered and freed one at a time, such as a transformer block.

    Returns:
        The model to train; its parameters go to :meth:`optimizer`.

    Raises:
        RankError: the model has no parameters to train, differs between ranks, or is already wrapped; a class
            named here does not occur in it; or the strategy or type is unknown.
    """
    recomputed, sharded = tuple(checkpoint_activations), tuple(shard)
    ctx._watch.start()
    _check(module, strategy, compress, {"checkpoint_activations": recomputed, "shard": sharded})
    module = module.to(ctx.device)
    if channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if ctx.world_size > 1:
        _check_same(ctx, module)
    if recomputed:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        # This keeps the keys of state_dict.
        apply_activation_checkpointing(module, check_fn=lambda part: isinstance(part, recomputed))
    if compile:
        # In place, which keeps the keys: the complete model or, before sharding, its parts.
        parts = matching(module, sharded) if strategy == "fsdp" and sharded else [module]
        for part in parts:
            part.compile(mode=compile if isinstance(compile, str) else None)
    if ctx.world_size == 1:
        return module
    if strategy == "auto":
        strategy = choose(module, ctx.device.type, deterministic=ctx.deterministic)
    unused, sent_as = find_unused_parameters, DTYPES[compress] if compress else None
    if strategy == "ddp":
        return mark(Buckets(ctx, module, static_graph=static_graph, find_unused_parameters=unused, sent_as=sent_as))
    copy_from_first([*module.parameters(), *module.buffers()])
    if strategy == "flat":
        return mark(Flat(ctx, module, find_unused_parameters=unused, sent_as=sent_as))
    return shard_model(ctx, module, sharded, find_unused_parameters=unused, sent_as=sent_as)


def _check(
    module: nn.Module, strategy: str, compress: str | None, named: dict[str, tuple[type[nn.Module], ...]]
) -> None:
    """Raise if the model cannot be trained with these options."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    if not isinstance(module, nn.Module):
        raise RankError(
            f"ctx.prepare() got {type(module).__name__} as its first argument",
            why="expected the model, a torch.nn.Module",
            fix="model = ctx.prepare(model); ctx.optimizer() makes optimizers, ctx.loader() loads data",
        )
    if isinstance(module, (DataParallel, DistributedDataParallel, Flat)):
        raise RankError(
            f"ctx.prepare() was given a model that is wrapped already, in {type(module).__name__}",
            fix="give it the model itself; it wraps it",
        )
    kinds = {"auto", "ddp", "flat", "fsdp"}
    if strategy not in kinds:
        raise RankError(f"there is no strategy {strategy!r}", fix=f"one of {', '.join(sorted(kinds))}")
    if compress not in (None, *DTYPES):
        raise RankError(f"gradients cannot be compressed to {compress!r}", fix="one of bf16, fp16, None")
    if not trained(module):
        frozen = sum(1 for _ in module.parameters())
        raise RankError(
            f"the model, {type(module).__name__}, has no parameters to train",
            why=f"all its {frozen} parameters are frozen (requires_grad=False)" if frozen else "it has none at all",
            fix="use it as it is, without ctx.prepare(), after module.to(ctx.device)",
        )
    inside = [part for part in module.modules() if part is not module]
    for requested, classes in named.items():
        for kind in classes:
            if not any(isinstance(part, kind) for part in inside):
                there = ", ".join(sorted({type(part).__name__ for part in inside})) or "it has none"
                raise RankError(
                    f"{requested}: the model has no {kind.__name__} inside",
                    why="it would do nothing",
                    fix=f"name classes of modules below the model itself: {there}",
                )


def _check_same(ctx: Context, module: nn.Module) -> None:
    """Check that all ranks built the same model; otherwise messages of different sizes would be mixed up."""
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


def choose(module: nn.Module, device: str, *, deterministic: bool) -> Literal["ddp", "flat"]:
    """Choose flat if it is faster, or if its fixed order of summation is needed."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in trained(module).values())
    sparse = any(getattr(part, "sparse", False) is True for part in module.modules())
    small = device == "cpu" and size <= FLAT_LIMIT
    return "flat" if (small or deterministic) and not sparse else "ddp"
