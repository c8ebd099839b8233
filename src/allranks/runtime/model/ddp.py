"""torch's ``DistributedDataParallel`` with the settings that are fast and right, and errors that name parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from allranks.runtime.model.wrappers import hook_outputs, trained, unused

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import GradBucket  # type: ignore[attr-defined]

    from allranks.runtime.context import Context
    from allranks.runtime.model.wrappers import PrepareOptions


class Buckets(DistributedDataParallel):
    """DistributedDataParallel that names the parameters that got no gradient, and counts backward passes.

    torch sorts its buckets again after the first step, in the order in which gradients were ready, and so sums them in
    another order; a run that was continued does that one step after its continuation, an undisturbed one after its
    first step, and from three ranks on their bits differ. torch leaves the buckets alone if it looks for unused
    parameters in each step (``Reducer::should_rebuild_buckets``), which is what ``deterministic`` does; torch warns
    once that it found none.

    Attributes:
        all_used: whether all parameters are expected to get gradients.
        must_average: whether the next backward pass must average: torch learns a static graph from the first one only.
    """

    def __init__(self, ctx: Context, module: nn.Module, options: PrepareOptions) -> None:
        super().__init__(
            module,
            device_ids=[ctx.device] if ctx.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            static_graph=options.static_graph and not ctx.deterministic,
            find_unused_parameters=options.find_unused_parameters or ctx.deterministic,
        )
        self.all_used = not (options.find_unused_parameters or self.static_graph)
        self.must_average = self.static_graph
        self._progress = ctx.progress
        self._queued = False
        if options.sent_as is not None:
            # A lambda, because torch refuses annotations that are strings.
            self.register_comm_hook(options.sent_as, lambda dtype, bucket: _narrowed(dtype, bucket))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model; raise if parameters got no gradient in the step before."""
        try:
            output = super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            names = list(trained(self.module))
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            missing = [names[int(number)] for number in found[1].split()] if found else ["(torch does not say which)"]
            raise unused(missing, distributed.get_rank()) from None
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            self._queued = False  # Left behind by a backward pass that failed.
            hook_outputs(output, self._on_backward)
        return output

    def _on_backward(self, _: Tensor) -> None:
        if not self._queued:
            self._queued = True
            self._progress.start_backward()
            Variable._execution_engine.queue_callback(self._count)

    def _count(self) -> None:
        """Count a backward pass, unless its gradients were not the parameters' (torch.autograd.grad)."""
        self._queued = False
        if any(parameter.grad is not None for parameter in self.module.parameters()):
            self._progress.backwards += 1
            self.must_average = False


def _narrowed(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in another type. torch's own hooks refuse bf16 over gloo, which can do it."""
    buffer = bucket.buffer()
    sent = buffer.to(dtype).div_(distributed.get_world_size())
    work: distributed.Work = distributed.all_reduce(sent, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: buffer.copy_(sent))
    return future
