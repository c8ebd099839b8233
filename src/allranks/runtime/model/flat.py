"""Data parallelism with one buffer for all gradients, and one message for all that are not large.

``DistributedDataParallel`` sends gradients in buckets while the rest is still computed, and rearranges the buckets
after the first step. That pays where a GPU computes and a network sends at the same time. On CPUs the same cores do
both; there each bucket is a message more, and only a large gradient is worth one of its own. The layout is also the
same for ever: a run that was continued adds up in the same order as one that was not, so that their weights are equal
to the bit, for any number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd import Variable

from allranks.runtime.model.buffer import Buffer, Early
from allranks.runtime.model.shared import make_shared
from allranks.runtime.model.wrappers import copy_from_first, places_of_buffers, tensors_in, trained, unused

if TYPE_CHECKING:
    from allranks.runtime.control import Control
    from allranks.runtime.progress import Progress


class Flat(nn.Module):
    """A model whose gradients are averaged over all ranks by the end of each backward pass.

    A plain ``loss.backward()`` is enough, as with ``DistributedDataParallel``, and ``module`` is the model. With
    buffers (running statistics), all ranks take those of rank 0 before each forward pass in training, as there.

    Args:
        module: the model; equal on all ranks.
        find_unused_parameters: whether parameters may get no gradient. What no rank gave a gradient to keeps
            None; where some ranks did, the others count as zero.
        compress: the type in which gradients travel; their own if None.
        neighbours: the ranks, if all are on this machine and compute on its CPUs: large gradients go through its
            memory then.
        progress: where backward passes are counted.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        find_unused_parameters: bool = False,
        compress: torch.dtype | None = None,
        neighbours: Control | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        #: Whether the next backward pass averages; the same name and meaning as in DistributedDataParallel.
        self.require_backward_grad_sync = True
        #: Whether gradients were averaged since the optimizer made a step.
        self.averaged = False
        self._queued = False
        self._names, self._parameters_trained = map(list, zip(*trained(module).items(), strict=True))
        by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
        for parameter in self._parameters_trained:
            by_kind[parameter.dtype, parameter.device].append(parameter)
        share = 1.0 / distributed.get_world_size()
        self._buffers_flat: list[Any] = [
            (make_shared(some, neighbours, distributed.get_rank()) if neighbours and compress is None else None)
            or Buffer(some, share, compress)
            for some in by_kind.values()
        ]
        self._early = Early([large for buffer in self._buffers_flat for large in buffer.large])
        for large in self._early.queue:
            large.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._on_large_gradient
            )
        self._progress = progress
        self._counted = False
        self._statistics = places_of_buffers(module)

    @property
    def gradients(self) -> list[Tensor]:
        """The averaged gradients of all parameters, one tensor of one dimension for each type of number."""
        return [buffer.gradients for buffer in self._buffers_flat]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model, and watch what comes out for the backward pass."""
        watched = self.require_backward_grad_sync and torch.is_grad_enabled()
        if watched and self._statistics and self.training:
            # A model may assign them anew, so they are looked up each time.
            copy_from_first(there for part, name in self._statistics if (there := part._buffers[name]) is not None)
        output = self.module(*inputs, **named)
        if watched:
            self._queued = False  # Left behind by a backward pass that failed.
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._on_backward)  # type: ignore[no-untyped-call]
        return output

    def _on_backward(self, _: Tensor) -> None:
        if not self._queued:
            self._queued = True
            self._counted = False
            if self._progress is not None:
                self._progress.begin_backward()
            self._early.begin()
            Variable._execution_engine.queue_callback(self._average)

    def _on_large_gradient(self, parameter: Tensor) -> None:
        if self._queued:
            self._count()
            with torch.no_grad():
                self._early.ready(parameter)

    def _average(self) -> None:
        """Replace the gradients of this rank by the average over all ranks.

        Raises:
            RankError: some parameters have no gradient, which was not announced.
        """
        self._queued = False
        missing = [index for index, parameter in enumerate(self._parameters_trained) if parameter.grad is None]
        if not self.find_unused_parameters:
            if len(missing) == len(self._parameters_trained):
                return  # torch.autograd.grad, which gives gradients to somebody else.
            if missing:
                raise unused([self._names[index] for index in missing], distributed.get_rank())
        self._count()
        with torch.no_grad():
            self._early.rest()
            sent = [buffer.send() for buffer in self._buffers_flat]
            self._early.wait()
            for buffer, work in zip(self._buffers_flat, sent, strict=True):
                buffer.receive(work)
            if self.find_unused_parameters:
                for index in self._unused_everywhere(missing):
                    self._parameters_trained[index].grad = None
        self.averaged = True

    def _count(self) -> None:
        """Count a backward pass for which other ranks are waited for, once."""
        if not self._counted and self._progress is not None:
            self._progress.backwards += 1
        self._counted = True

    def _unused_everywhere(self, missing: list[int]) -> list[int]:
        """Give those of the missing gradients that no rank has."""
        used = torch.ones(len(self._parameters_trained), dtype=torch.int32, device=self._parameters_trained[0].device)
        used[missing] = 0
        distributed.all_reduce(used, distributed.ReduceOp.MAX)
        return [index for index, somewhere in enumerate(used.tolist()) if not somewhere]
