"""torch's data-parallel wrappers with fast and correct settings, and helpers for all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from allranks.errors import RankError
from allranks.runtime.steptime import COMPUTE, EXCHANGE

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]

    from allranks.runtime.context import Context

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Prefix that activation checkpointing adds to parameter names.
_WRAPPED = "_checkpoint_wrapped_module."


class Buckets(DistributedDataParallel):
    """DistributedDataParallel that names the parameters that got no gradient, and counts backward passes.

    torch rebuilds its buckets after the first step, in the order in which gradients were ready, and so changes the
    order of summation. A resumed run does that one step after the resume, an uninterrupted one after its first step;
    with three or more ranks the results then differ in their last bits. torch keeps the buckets if it searches for
    unused parameters in each step (``Reducer::should_rebuild_buckets``), so ``deterministic`` turns that on; torch
    warns once that it found none.

    Attributes:
        all_used: whether all parameters are expected to get gradients.
        must_average: whether the next backward pass must average: torch learns a static graph from the first one only.
    """

    def __init__(
        self,
        ctx: Context,
        module: nn.Module,
        *,
        static_graph: bool,
        find_unused_parameters: bool,
        sent_as: torch.dtype | None,
    ) -> None:
        super().__init__(
            module,
            device_ids=[ctx.device] if ctx.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            static_graph=static_graph and not ctx.deterministic,
            find_unused_parameters=find_unused_parameters or ctx.deterministic,
        )
        self.all_used = not (find_unused_parameters or self.static_graph)
        self.must_average = self.static_graph
        self._progress = ctx.progress
        self._queued = False
        if sent_as is not None:
            # A lambda, because torch refuses annotations that are strings.
            self.register_comm_hook(sent_as, lambda dtype, bucket: _narrowed(dtype, bucket))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model; raise if parameters got no gradient in the previous step."""
        if synced := self.require_backward_grad_sync and torch.is_grad_enabled():
            self._progress.clock.enter(COMPUTE)
        try:
            output = super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            names = list(trained(self.module))
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            missing = [names[int(number)] for number in found[1].split()] if found else ["(torch does not say which)"]
            raise unused(missing, distributed.get_rank()) from None
        if synced:
            self._queued = False  # A failed backward pass may have left it set.
            hook_outputs(output, self._on_backward)
        return output

    def _on_backward(self, _: Tensor) -> None:
        if not self._queued:
            self._queued = True
            self._progress.start_backward()
            Variable._execution_engine.queue_callback(self._count)

    def _count(self) -> None:
        """Count a backward pass, unless it was torch.autograd.grad, which sets no gradients of parameters."""
        self._queued = False
        if any(parameter.grad is not None for parameter in self.module.parameters()):
            self._progress.backwards += 1
            self.must_average = False
            self._progress.clock.enter(EXCHANGE)
            # Runs after torch's callback, which waits for the averages.
            Variable._execution_engine.queue_callback(self._end_exchange)

    def _end_exchange(self) -> None:
        self._progress.clock.enter(COMPUTE)

    def _sync_buffers(self) -> None:
        """Take the buffers of rank 0: torch does so before a forward pass."""
        with self._progress.clock.during(EXCHANGE):
            super()._sync_buffers()  # type: ignore[no-untyped-call]


def _narrowed(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket in another type. torch's own hooks reject bf16 over gloo, though gloo supports it."""
    buffer = bucket.buffer()
    sent = buffer.to(dtype).div_(distributed.get_world_size())
    work: distributed.Work = distributed.all_reduce(sent, async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda _: buffer.copy_(sent))
    return future


def shard_model(
    ctx: Context,
    module: nn.Module,
    classes: Sequence[type[nn.Module]],
    *,
    find_unused_parameters: bool,
    sent_as: torch.dtype | None,
) -> nn.Module:
    """Shard a model, equal on all ranks, in place with torch's ``fully_shard``, and return it.

    Each rank holds a part of the parameters, gradients and optimizer state. Modules of the
    ``classes`` are gathered and freed one by one; all other parameters with the root. Gradients are summed in
    ``sent_as`` or, if that is None, in fp32. The model gets the attribute ``all_used``: whether all parameters are
    expected to get gradients.
    """
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:  # Before torch 2.6 it was elsewhere.
        from torch.distributed._composable.fsdp import (  # type: ignore[attr-defined]
            MixedPrecisionPolicy,
            fully_shard,
        )
    progress, narrow = ctx.progress, DTYPES.get(ctx.precision)

    def count(module: nn.Module, _: object) -> None:
        """Count the forward passes, which already wait for the other ranks."""
        if module.training and torch.is_grad_enabled() and (progress.is_boundary or not progress.open):
            progress.backwards += 1
            progress.clock.enter(COMPUTE)

    module.register_forward_pre_hook(count)
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    summed_as = sent_as or (torch.float32 if narrow else None)
    for part in [*matching(module, classes), module]:
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=summed_as))
    module.all_used = not find_unused_parameters  # type: ignore[assignment]
    return module


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the model."""
    return hasattr(module, "set_requires_gradient_sync")


def unsent(module: nn.Module) -> list[tuple[Any, str]]:
    """Return the accumulated gradients of a sharded model, as pairs of an object and an attribute name."""
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
            fix='let each loop end with a complete effective batch of ctx.accumulate, or take strategy="ddp"',
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


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that get gradients, by the script's names; shared ones once."""
    return {
        name.replace(_WRAPPED, ""): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def copy_from_first(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with rank 0's values in few messages; collective."""
    from torch.distributed import _broadcast_coalesced, group  # type: ignore[attr-defined]

    everyone = group.WORLD
    assert everyone is not None
    _broadcast_coalesced(everyone, [tensor.detach() for tensor in tensors], 1 << 28, 0)


def unused(names: Sequence[str], rank: int) -> RankError:
    """Return the error for parameters that got no gradient."""
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return RankError(
        f"{len(names)} parameter{'s' if len(names) > 1 else ''} of the model got no gradient on rank {rank}: {shown}",
        why="the loss does not depend on them, and ranks average the gradients of all parameters together",
        fix="take them out or freeze them (requires_grad_(False)), or, where they are used in some steps only, "
        "ctx.prepare(..., find_unused_parameters=True)",
    )


def hook_outputs(output: Any, call: Callable[[Tensor], None]) -> None:
    """Call a function when the backward pass reaches the output of a model."""
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
