"""torch's ``DistributedDataParallel`` with the settings that are fast and right, and errors that name parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from allranks.runtime.model.wrappers import tensors_in, trained, unused

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import GradBucket  # type: ignore[attr-defined]

    from allranks.runtime.progress import Progress


class Buckets(DistributedDataParallel):
    """DistributedDataParallel that says which parameters got no gradient."""

    #: Whether all parameters are expected to get gradients.
    all_used = True
    #: Where backward passes are counted.
    progress: Progress | None = None
    #: Whether the next backward pass must average: torch learns a static graph from the first one, and only so.
    must_average = False
    _queued = False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model.

        Raises:
            RankError: parameters got no gradient in the step before.
        """
        try:
            output = super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            raise unused(self._names_in(str(error)), distributed.get_rank()) from None
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            self._queued = False  # Left behind by a backward pass that failed.
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._on_backward)  # type: ignore[no-untyped-call]
        return output

    def _on_backward(self, _: Tensor) -> None:
        if not self._queued and self.progress is not None:
            self._queued = True
            self.progress.begin_backward()
            Variable._execution_engine.queue_callback(self._count)

    def _count(self) -> None:
        """Count a backward pass, unless it gave gradients to somebody else (torch.autograd.grad)."""
        self._queued = False
        if self.progress is not None and any(p.grad is not None for p in self.module.parameters()):
            self.progress.backwards += 1
            self.must_average = False

    def _names_in(self, message: str) -> list[str]:
        """Translate torch's numbers of parameters into names."""
        names = list(trained(self.module))
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        return [names[int(number)] for number in found[1].split()] if found else ["(torch does not say which)"]


def make_buckets(
    module: nn.Module,
    device: torch.device,
    *,
    static_graph: bool,
    find_unused_parameters: bool,
    deterministic: bool,
    compress: torch.dtype | None,
    progress: Progress,
) -> Buckets:
    """Wrap a model in DistributedDataParallel.

    torch puts gradients into buckets anew after the first step, in the order in which they were ready, and so sums
    them in another order; a run that was continued does that one step after its continuation, an undisturbed one
    after its first step, and from three ranks on their bits differ. torch leaves the buckets alone if it looks for
    unused parameters in each step (``Reducer::should_rebuild_buckets``), which is what ``deterministic`` does; torch
    warns once that it found none.
    """
    wrapped = Buckets(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=static_graph and not deterministic,
        find_unused_parameters=find_unused_parameters or deterministic,
    )
    wrapped.progress = progress
    wrapped.must_average = wrapped.static_graph
    wrapped.all_used = not (find_unused_parameters or wrapped.static_graph)
    if compress is not None:
        # A lambda, because torch takes offence at annotations that are strings.
        wrapped.register_comm_hook(compress, lambda dtype, bucket: _narrowed(dtype, bucket))
    return wrapped


def _narrowed(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in another type. torch's own hooks refuse bf16 over gloo, which can do it."""
    buffer = bucket.buffer()
    sent = buffer.to(dtype).div_(distributed.get_world_size())
    work: distributed.Work = distributed.all_reduce(sent, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: buffer.copy_(sent))
    return future
