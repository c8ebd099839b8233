"""What the wrappers around a model have in common, and the options that choose one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from allranks.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Strategy = Literal["auto", "ddp", "flat", "fsdp"]
#: What the wrapper that checkpoints a module's activations puts into the names of its parameters.
_WRAPPED = "_checkpoint_wrapped_module."


@dataclass(frozen=True)
class PrepareOptions:
    """The arguments of ``ctx.prepare``."""

    strategy: Strategy = "auto"
    static_graph: bool = False
    find_unused_parameters: bool = False
    checkpoint_activations: tuple[type[nn.Module], ...] = ()
    compile: bool | str = False
    channels_last: bool = False
    compress: Literal["bf16", "fp16"] | None = None
    shard: tuple[type[nn.Module], ...] = ()

    @property
    def sent_as(self) -> torch.dtype | None:
        """The type in which gradients travel; None for their own."""
        return None if self.compress is None else DTYPES[self.compress]


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that get gradients, by the script's names; shared ones once."""
    return {
        name.replace(_WRAPPED, ""): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


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


def hook_outputs(output: Any, call: Callable[[Tensor], None]) -> None:
    """Have a function called when the backward pass reaches what a model returned."""
    for tensor in _tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(call)  # type: ignore[no-untyped-call]


def _tensors_in(output: Any) -> Iterator[Tensor]:
    """Find the tensors in a model's output: nested sequences, mappings, data classes, and plain objects."""
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
        yield from _tensors_in(value)
