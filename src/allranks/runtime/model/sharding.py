"""Fully sharded data parallelism: each rank holds a part of the parameters, gradients and optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from allranks.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


#: Set on a sharded model: whether all parameters are expected to get gradients.
_ALL_USED = "_allranks_all_used"


def shard(
    module: nn.Module,
    classes: Sequence[type[nn.Module]],
    world_size: int,
    device: torch.device,
    *,
    narrow: torch.dtype | None,
    compress: torch.dtype | None,
    all_used: bool,
) -> nn.Module:
    """Shard a model in place with torch's ``fully_shard``, and give it back.

    Args:
        module: the model on its device, equal on all ranks.
        classes: modules of these classes are gathered and freed one by one; what is left, with the root.
        world_size: number of ranks, over all of which each parameter is spread.
        device: of the model.
        narrow: the type for computing, bf16 or fp16, or None. Gradients are summed in fp32 all the same, unless
        compress: is the type in which they travel and are summed.
        all_used: whether all parameters are expected to get gradients.

    Raises:
        RankError: this torch has no ``fully_shard``.
    """
    from torch.distributed.device_mesh import init_device_mesh

    fully_shard, policy = _torch_parts()
    mesh = init_device_mesh(device.type, (world_size,))
    mixed = policy(param_dtype=narrow, reduce_dtype=compress or (torch.float32 if narrow else None))
    for part in [*matching(module, classes), module]:
        fully_shard(part, mesh=mesh, mp_policy=mixed)
    setattr(module, _ALL_USED, all_used)
    return module


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the model."""
    return hasattr(module, "set_requires_gradient_sync")


def uses_all(module: nn.Module) -> bool:
    """Whether this is a sharded model all of whose parameters are expected to get gradients."""
    return is_sharded(module) and bool(getattr(module, _ALL_USED, False))


def unsent(module: nn.Module) -> list[tuple[Any, str]]:
    """Give where gradients of a sharded model wait for further micro-batches: objects, and names of attributes.

    Raises:
        RankError: this torch keeps them somewhere else. It has no public way to them.
    """
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
    """Give the modules of some classes below the root, each with the wrapper that checkpoints its activations."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    wrapped = {
        part._checkpoint_wrapped_module: part for part in module.modules() if isinstance(part, CheckpointWrapper)
    }
    found = [part for part in module.modules() if part is not module and isinstance(part, tuple(classes))]
    return [wrapped.get(part, part) for part in found]


def _torch_parts() -> tuple[Any, Any]:
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:  # Before torch 2.6 it stood elsewhere.
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
    return fully_shard, MixedPrecisionPolicy
