"""Fully sharded data parallelism: each rank holds a part of the parameters, gradients and optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from allranks.errors import RankError
from allranks.runtime.model.wrappers import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from allranks.runtime.context import Context
    from allranks.runtime.model.wrappers import PrepareOptions


def shard(ctx: Context, module: nn.Module, options: PrepareOptions) -> nn.Module:
    """Shard a model, equal on all ranks, in place with torch's ``fully_shard``, and return it.

    Modules of the classes in ``options.shard`` are gathered and freed one by one; what is left, with the root.
    Gradients are summed in fp32, whatever the type for computing, or in that of ``options.compress``. The attribute
    ``all_used`` is set on the model: whether all parameters are expected to get gradients.
    """
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:  # Before torch 2.6 it was elsewhere.
        try:
            from torch.distributed._composable.fsdp import (  # type: ignore[attr-defined]
                MixedPrecisionPolicy,
                fully_shard,
            )
        except ImportError:
            raise RankError(
                f"torch {torch.__version__} has no fully_shard",
                why='strategy="fsdp" stands on it',
                fix='pip install "torch>=2.6", or strategy="ddp"',
            ) from None
    progress, narrow = ctx.progress, DTYPES.get(ctx.precision)

    def count(module: nn.Module, _: object) -> None:
        """Count steps by the forward passes, which wait for the other ranks already."""
        if module.training and torch.is_grad_enabled() and (progress.is_boundary or not progress.open):
            progress.backwards += 1

    module.register_forward_pre_hook(count)
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    summed_as = options.sent_as or (torch.float32 if narrow else None)
    for part in [*matching(module, options.shard), module]:
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=summed_as))
    module.all_used = not options.find_unused_parameters  # type: ignore[assignment]
    return module


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the model."""
    return hasattr(module, "set_requires_gradient_sync")


def unsent(module: nn.Module) -> list[tuple[Any, str]]:
    """Return where gradients of a sharded model wait for further micro-batches: objects, and names of attributes."""
    found: list[tuple[Any, str]] = []
    try:
        for part in filter(is_sharded, module.modules()):
            state: Any = part._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for each in [each for group in groups if group is not None for each in group.fsdp_params]:
                found += [(each, "unsharded_accumulated_grad"), (each._unsharded_param, "grad")]
    except AttributeError as error:
        raise RankError(
            f"torch {torch.__version__} does not show the gradients of micro-batches of a sharded model",
            why=str(error),
            fix='let each loop end with a whole effective batch of ctx.accumulate, or take strategy="ddp"',
        ) from error
    return found


def matching(module: nn.Module, classes: Sequence[type[nn.Module]]) -> list[nn.Module]:
    """Return the modules of some classes below the root, each with the wrapper that checkpoints its activations."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    wrapped = {
        part._checkpoint_wrapped_module: part for part in module.modules() if isinstance(part, CheckpointWrapper)
    }
    found = [part for part in module.modules() if part is not module and isinstance(part, tuple(classes))]
    return [wrapped.get(part, part) for part in found]
