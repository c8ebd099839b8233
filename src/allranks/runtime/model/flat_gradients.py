"""Data parallelism with one buffer for all gradients, and one message for all small ones.

``DistributedDataParallel`` sends gradients in buckets while the rest is computed, and rebuilds the buckets after the
first step. That pays off if a GPU computes while the network sends. On CPUs the same cores do both, so each bucket is
an extra message, and only a large gradient is worth one. Also, this layout never changes: a resumed run sums in the
same order as an uninterrupted one, so that their weights are bit-identical, on any number of ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd import Variable

from allranks.errors import RankError
from allranks.runtime.model.allreduce import Message, SharedMessage, make_shared
from allranks.runtime.model.wrappers import copy_from_first, hook_outputs, trained, unused
from allranks.runtime.steptime import COMPUTE, EXCHANGE

if TYPE_CHECKING:
    from allranks.runtime.context import Context

#: A gradient of at least this many elements is sent separately, as soon as it is ready: 512 KiB in fp32.
LARGE = 1 << 17


class Flat(nn.Module):
    """A model whose gradients are averaged over all ranks by the end of each backward pass.

    As with ``DistributedDataParallel``, a plain ``loss.backward()`` is enough, ``module`` is the model, and all ranks
    take rank 0's buffers (running statistics) before each forward pass in training.

    Gradients go through shared memory if all ranks compute on the CPUs of one machine. If parameters may get no
    gradient, those that no rank used keep None; if only some ranks used one, the others contribute zero.

    Attributes:
        require_backward_grad_sync: whether the next backward pass averages, as in DistributedDataParallel.
        averaged: whether gradients were averaged since the optimizer made a step.
    """

    def __init__(
        self, ctx: Context, module: nn.Module, *, find_unused_parameters: bool, sent_as: torch.dtype | None
    ) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self.averaged = False
        self._find_unused_parameters = find_unused_parameters
        #: Sent during the backward pass, on all ranks in this order, in which gradients are approximately ready.
        self._early: list[Message] = []
        #: Sent at the end of the backward pass.
        self._late: list[Message | SharedMessage] = []
        self._trained = trained(module)
        share_memory = ctx.device.type == "cpu" and ctx.local_world_size == ctx.world_size and sent_as is None
        by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
        for parameter in self._trained.values():
            by_kind[parameter.dtype, parameter.device].append(parameter)
        for (dtype, device), parameters in by_kind.items():
            buffer = torch.zeros(sum(map(nn.Parameter.numel, parameters)), dtype=dtype, device=device)
            shared = make_shared(parameters, buffer, ctx.control) if share_memory else None
            if shared is not None:
                self._late.append(shared)
            else:
                self._add_messages(parameters, buffer, sent_as)
        self._early.reverse()
        for message in self._early:
            message.parameters[0].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._on_large_gradient
            )
        self._progress = ctx.progress
        self._queued = False
        self._counted = False
        self._unsent: deque[Message] = deque()
        self._ready: set[Tensor] = set()
        self._has_buffers = any(True for _ in module.buffers())

    def _add_messages(self, parameters: list[nn.Parameter], buffer: Tensor, compress: torch.dtype | None) -> None:
        """Add one message for all small gradients, which come first in the buffer, and one for each large one."""
        small = [parameter for parameter in parameters if parameter.numel() < LARGE]
        end = sum(map(nn.Parameter.numel, small))
        if small:
            self._late.append(Message(small, buffer[:end], compress))
        for parameter in parameters:
            if parameter.numel() >= LARGE:
                self._early.append(Message([parameter], buffer[end : end + parameter.numel()], compress))
                end += parameter.numel()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model, and hook its outputs to notice the backward pass."""
        synced = self.require_backward_grad_sync and torch.is_grad_enabled()
        if synced:
            clock = self._progress.clock
            if self._has_buffers and self.training:
                clock.enter(EXCHANGE)
                copy_from_first(self.module.buffers())
            clock.enter(COMPUTE)
        output = self.module(*inputs, **named)
        if synced:
            self._queued = False  # A failed backward pass may have left it set.
            hook_outputs(output, self._on_backward)
        return output

    def _on_backward(self, _: Tensor) -> None:
        if not self._queued:
            self._queued = True
            self._counted = False
            self._progress.start_backward()
            self._unsent = deque(self._early)
            self._ready.clear()
            Variable._execution_engine.queue_callback(self._average)

    def _on_large_gradient(self, parameter: Tensor) -> None:
        """Send the gradients that are ready, in the fixed order."""
        if not self._queued:
            return
        self._count()
        if parameter in self._ready:
            raise RankError(
                "a parameter got its gradient twice in one backward pass",
                why="part of the model is computed again inside the backward pass, with use_reentrant=True",
                fix="torch.utils.checkpoint with use_reentrant=False, or ctx.prepare(..., checkpoint_activations=...)",
            )
        self._ready.add(parameter)
        with torch.no_grad():
            while self._unsent and self._unsent[0].parameters[0] in self._ready:
                self._unsent.popleft().send()

    def _average(self) -> None:
        """Replace this rank's gradients by the averages over all ranks."""
        self._queued = False
        missing = [name for name, parameter in self._trained.items() if parameter.grad is None]
        if not self._find_unused_parameters:
            if len(missing) == len(self._trained):
                return  # torch.autograd.grad, which sets no gradients of parameters.
            if missing:
                raise unused(missing, distributed.get_rank())
        self._count()
        self._progress.clock.enter(EXCHANGE)
        with torch.no_grad():
            for message in [*self._unsent, *self._late]:
                message.send()
            for message in [*self._early, *self._late]:
                message.receive()
            if self._find_unused_parameters:
                self._forget_unused(set(missing))
        self._progress.clock.enter(COMPUTE)
        self.averaged = True

    def _forget_unused(self, missing: set[str]) -> None:
        """Set gradients that no rank computed to None."""
        parameters = list(self._trained.values())
        lacking = torch.tensor([name in missing for name in self._trained], dtype=torch.int32).to(parameters[0].device)
        distributed.all_reduce(lacking, distributed.ReduceOp.MIN)
        for parameter, everywhere in zip(parameters, lacking.tolist(), strict=True):
            if everywhere:
                parameter.grad = None

    def _count(self) -> None:
        """Count a backward pass that waits for other ranks, once."""
        if not self._counted:
            self._progress.backwards += 1
        self._counted = True


def unwrap(module: nn.Module) -> nn.Module:
    """Return the model that the script gave to ``ctx.prepare``, with the script's ``state_dict`` keys.

    A sharded model (FSDP) stays sharded: its ``state_dict`` holds distributed tensors.
    """
    from torch.nn.parallel import DistributedDataParallel

    while isinstance(module, (DistributedDataParallel, Flat)):
        module = module.module
    return module
