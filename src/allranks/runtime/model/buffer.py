"""The buffer in which gradients lie one behind the other, and the messages that average it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, distributed, nn

from allranks.errors import RankError

#: Numbers in a gradient from which on it is sent by itself, as soon as it is there: half a megabyte in fp32.
_LARGE = 1 << 17


class Large:
    """A gradient that is sent by itself: divided while it is copied, which saves a pass over the memory."""

    def __init__(self, parameter: nn.Parameter, view: Tensor, message: Tensor, share: float) -> None:
        self.parameter = parameter
        self._view = view
        self._message = message
        self._share = share
        self._narrow = message.dtype != view.dtype
        self.work: distributed.Work | None = None

    def copy(self) -> None:
        """Put the gradient, divided, into the buffer."""
        torch.mul(gradient(self.parameter, self._view), self._share, out=self._view)
        if self._narrow:
            self._message.copy_(self._flat())
        self.parameter.grad = self._view

    def send(self) -> None:
        """Begin to add it up over the ranks."""
        self.work = distributed.all_reduce(self._message, async_op=True)

    def wait(self) -> None:
        """Wait for the sum."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        if self._narrow:
            self._flat().copy_(self._message)

    def _flat(self) -> Tensor:
        return self._view.as_strided((self._view.numel(),), (1,), self._view.storage_offset())


class Early:
    """Sends large gradients while the rest is computed, on all ranks in the same order, whatever is ready first.

    Args:
        larges: in the order of the model; their gradients come in about the reverse of it.
    """

    def __init__(self, larges: list[Large]) -> None:
        self.queue = larges[::-1]
        self._ready: dict[Tensor, bool] = {}
        self._next = 0

    def begin(self) -> None:
        """Start a backward pass."""
        self._ready = {large.parameter: False for large in self.queue}
        self._next = 0

    def ready(self, parameter: Tensor) -> None:
        """Take a gradient, and send what can be sent without overtaking.

        Raises:
            RankError: it was there before in this backward pass.
        """
        if self._ready[parameter]:
            raise RankError(
                "a parameter got its gradient twice in one backward pass",
                why="part of the model is computed again inside the backward pass, with use_reentrant=True",
                fix="torch.utils.checkpoint with use_reentrant=False, or ctx.prepare(..., checkpoint_activations=...)",
            )
        self._ready[parameter] = True
        while self._next < len(self.queue) and self._ready[self.queue[self._next].parameter]:
            self._send_next()

    def rest(self) -> None:
        """Send what has not been sent: behind a gradient that did not come."""
        while self._next < len(self.queue):
            self._send_next()

    def wait(self) -> None:
        """Wait for all sums."""
        for large in self.queue:
            large.wait()

    def _send_next(self) -> None:
        large = self.queue[self._next]
        self._next += 1
        large.copy()
        large.send()


class Buffer:
    """The gradients of all parameters of one type of number: those that are not large in front, sent together.

    Args:
        parameters: that get gradients.
        share: what gradients are multiplied with before they are added up: 1 / number of ranks.
        compress: the type in which they travel; their own if None.
    """

    def __init__(self, parameters: list[nn.Parameter], share: float, compress: torch.dtype | None) -> None:
        small = [parameter for parameter in parameters if parameter.numel() < _LARGE]
        large = [parameter for parameter in parameters if parameter.numel() >= _LARGE]
        size = sum(map(nn.Parameter.numel, parameters))
        self.gradients = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
        message = self.gradients if compress is None else torch.empty_like(self.gradients, dtype=compress)
        views = list(views_of(self.gradients, [*small, *large]))
        pieces: tuple[Tensor, ...] = torch.split(message, [p.numel() for p in [*small, *large]])
        self._share = share
        self._small = small
        self._small_views = views[: len(small)]
        front = sum(map(nn.Parameter.numel, small))
        self._front, self._message = self.gradients[:front], message[:front]
        self._narrow = message.dtype != self.gradients.dtype
        #: The large ones, in the order of the model.
        self.large = [
            Large(*each, share) for each in zip(large, views[len(small) :], pieces[len(small) :], strict=True)
        ]

    def send(self) -> distributed.Work | None:
        """Gather the small gradients, divide them, and begin to add them up."""
        if not self._small:
            return None
        gathered = [gradient(parameter, view) for parameter, view in zip(self._small, self._small_views, strict=True)]
        torch._foreach_copy_(self._small_views, gathered)
        self._front.mul_(self._share)
        if self._narrow:
            self._message.copy_(self._front)
        work: distributed.Work = distributed.all_reduce(self._message, async_op=True)
        return work

    def receive(self, work: distributed.Work | None) -> None:
        """Wait for the sum, and make the small gradients views of it."""
        if work is None:
            return
        work.wait()
        if self._narrow:
            self._front.copy_(self._message)
        for parameter, view in zip(self._small, self._small_views, strict=True):
            parameter.grad = view


def gradient(parameter: nn.Parameter, view: Tensor) -> Tensor:
    """Give the gradient; zeros in its place in the buffer, if there is none.

    Raises:
        RankError: it is sparse.
    """
    if parameter.grad is None:
        return view.zero_()
    if parameter.grad.layout is not torch.strided:
        raise RankError(
            "a parameter has a sparse gradient, which does not fit into one flat buffer",
            fix='ctx.prepare(model, strategy="ddp")',
        )
    return parameter.grad


def views_of(flat: Tensor, parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """Cut a buffer into pieces of the shapes and, for memory formats as channels-last, strides of the parameters."""
    at = 0
    for parameter in parameters:
        piece = flat[at : at + parameter.numel()]
        at += parameter.numel()
        # A parameter with gaps in memory, or one that overlaps itself, gets a gradient without.
        dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        strides = parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
        yield piece.as_strided(parameter.shape, strides, piece.storage_offset())
