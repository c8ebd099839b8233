"""What the wrappers around a model have in common, and the way back to the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from allranks.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


#: What the wrapper that checkpoints a module's activations puts into the names of its parameters.
_WRAPPED = "_checkpoint_wrapped_module."


def unwrap(module: nn.Module) -> nn.Module:
    """Give the model that the script handed to ``ctx.prepare``, whose keys of ``state_dict`` are the script's own.

    A sharded model (FSDP) stays sharded: its ``state_dict`` holds distributed tensors.
    """
    from torch.nn.parallel import DistributedDataParallel

    from allranks.runtime.model.flat import Flat

    while isinstance(module, (DistributedDataParallel, Flat)):
        module = module.module
    return module


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Give the parameters that get gradients, by the name that the script knows; shared ones once."""
    return {
        name.replace(_WRAPPED, ""): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def places_of_buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Give where the buffers of a model stand; shared ones once."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                found.setdefault(id(buffer), (part, name))
    return list(found.values())


def copy_from_first(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors, in as few messages as possible, with what rank 0 has; all ranks call it."""
    from torch.distributed import _broadcast_coalesced, group  # type: ignore[attr-defined]

    everyone = group.WORLD
    assert everyone is not None
    _broadcast_coalesced(everyone, [tensor.detach() for tensor in tensors], 1 << 28, 0)


def unused(names: Iterable[str], rank: int) -> RankError:
    """Make the error for parameters that got no gradient."""
    names = list(names)
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return RankError(
        f"{len(names)} parameter{'s' if len(names) > 1 else ''} of the model got no gradient on rank {rank}: {shown}",
        why="the loss does not depend on them, and ranks average the gradients of all parameters together",
        fix="take them out or freeze them (requires_grad_(False)), or, where they are used in some steps only, "
        "ctx.prepare(..., find_unused_parameters=True)",
    )


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Find the tensors in what a model gave: nested sequences, mappings, data classes, and plain objects."""
    if isinstance(output, Tensor):
        yield output
        return
    if isinstance(output, Mapping):
        inside: Iterable[Any] = output.values()
    elif isinstance(output, (list, tuple, set)):
        inside = output
    elif is_dataclass(output):
        inside = [getattr(output, field.name, None) for field in fields(output)]
    else:
        inside = [value for value in getattr(output, "__dict__", {}).values() if isinstance(value, Tensor)]
    for value in inside:
        yield from tensors_in(value)
