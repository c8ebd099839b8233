"""Averages gradients over ranks: by messages, or through shared memory if all ranks are on one machine.

Shared memory is faster than gloo's sockets. Each rank has a block: its gradients, then its slice of the averages. The
ranks write their gradients, synchronise, sum one slice each, synchronise, and copy all slices. No rank writes what
another may still read: gradients are read only between the two barriers, and averages from the second barrier to the
first one of the next step. Ranks are summed in order, so results are bit-identical.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed, nn

from allranks.errors import RankError

if TYPE_CHECKING:
    from allranks.runtime.exchange import CpuGroup

#: Bytes of gradients from which on shared memory is faster than a message, whose cost is mostly system calls.
LEAST = 1 << 20
#: Size of the token at the start of each block, which identifies it, in bytes.
_TOKEN = 64
#: Elements to sum at a time, few enough to stay in the cache.
_CHUNK = 1 << 17


class Message:
    """Parameters of one type whose gradients travel together, divided by the number of ranks before they are summed.

    ``buffer`` (one dimension) holds the gradients. They are sent as ``compress``, or in their own type if that is None.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], buffer: Tensor, compress: torch.dtype | None) -> None:
        self.parameters = parameters
        self._buffer = buffer
        self._views = list(views_of(buffer, parameters))
        self._sent = buffer if compress is None else torch.empty_like(buffer, dtype=compress)
        self._share = 1.0 / distributed.get_world_size()
        self._work: distributed.Work | None = None

    def send(self) -> None:
        """Copy the gradients into the buffer, make them views of it, and start the sum over the ranks."""
        gradients = gradients_of(self.parameters, self._views)
        if len(gradients) == 1:  # It may be large: one pass over memory, not two.
            torch.mul(gradients[0], self._share, out=self._views[0])
        else:
            torch._foreach_copy_(self._views, gradients)
            self._buffer.mul_(self._share)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view
        if self._sent is not self._buffer:
            self._sent.copy_(self._buffer)
        self._work = distributed.all_reduce(self._sent, async_op=True)

    def receive(self) -> None:
        """Wait for the average."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        if self._sent is not self._buffer:
            self._buffer.copy_(self._sent)


class SharedMessage:
    """Averages gradients as :class:`Message` does, through shared memory: a block for each rank.

    ``buffer`` gets the averages, of which the gradients become views.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], buffer: Tensor, blocks: list[mmap.mmap], rank: int) -> None:
        size, world_size = buffer.numel(), len(blocks)
        part = _slice_length(size, world_size)
        everything = [torch.frombuffer(memory, dtype=buffer.dtype, offset=_TOKEN) for memory in blocks]
        self._parameters = parameters
        self._views = list(views_of(buffer, parameters))
        self._shared_views = list(views_of(everything[rank][:size], parameters))
        mine = slice(rank * part, (rank + 1) * part)
        self._inputs = [each[:size][mine] for each in everything]
        self._average = everything[rank][size : size + self._inputs[0].numel()]
        self._results: tuple[Tensor, ...] = torch.split(buffer, part)
        self._averages = [
            each[size : size + result.numel()] for each, result in zip(everything, self._results, strict=False)
        ]
        self._share = 1.0 / world_size
        self._meeting = torch.zeros(1)

    def send(self) -> None:
        """Write this rank's gradients to its block, and average a slice."""
        torch._foreach_copy_(self._shared_views, gradients_of(self._parameters, self._views))
        distributed.all_reduce(self._meeting)
        slices: list[tuple[Tensor, ...]] = [torch.split(each, _CHUNK) for each in (self._average, *self._inputs)]
        for average, *inputs in zip(*slices, strict=True):
            torch.add(inputs[0], inputs[1], out=average)
            for more in inputs[2:]:
                average.add_(more)
            average.mul_(self._share)

    def receive(self) -> None:
        """Take the averages of all slices."""
        distributed.all_reduce(self._meeting)
        for result, average in zip(self._results, self._averages, strict=True):
            result.copy_(average)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view


def _slice_length(size: int, world_size: int) -> int:
    """Return the length of a rank's slice; the last ones may be shorter, or empty."""
    return -(-size // world_size)


def make_shared(parameters: Sequence[nn.Parameter], buffer: Tensor, control: CpuGroup) -> SharedMessage | None:
    """Make a message through shared memory; None if it is not worthwhile or not possible.

    All ranks call it, with buffers of the same size.
    """
    size, world_size = buffer.numel(), distributed.get_world_size()
    if size * buffer.element_size() < LEAST or not hasattr(os, "memfd_create"):
        return None
    blocks = _open_blocks((size + _slice_length(size, world_size)) * buffer.element_size(), world_size, control)
    return SharedMessage(parameters, buffer, blocks, distributed.get_rank()) if blocks else None


def _open_blocks(size: int, world_size: int, control: CpuGroup) -> list[mmap.mmap]:
    """Create a block of ``size`` bytes per rank and open all of them; empty on all ranks if one fails.

    The kernel frees a block with the last process that maps it.
    """
    own, token = -1, secrets.token_bytes(_TOKEN)
    with suppress(OSError):
        own = os.memfd_create("allranks-gradients")
        os.truncate(own, _TOKEN + size)
        os.pwrite(own, token, 0)
    blocks: list[mmap.mmap] = []
    try:
        for pid, descriptor, its_token in control.gather((os.getpid(), own, token)):
            with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
                blocks.append(mmap.mmap(file.fileno(), 0))
            if blocks[-1][:_TOKEN] != its_token:  # It belongs to a process with the same id in another container.
                blocks.pop()
    except (OSError, ValueError):  # A block that is missing, or empty.
        blocks = []
    # Also the barrier after which a rank may close a file that the others have opened.
    missing = control.agree(world_size - len(blocks))[0]
    if own >= 0:
        os.close(own)
    return [] if missing else blocks


def gradients_of(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients; for a parameter without one its view of the buffer, set to zero."""
    found = []
    for parameter, view in zip(parameters, views, strict=True):
        gradient = parameter.grad
        if gradient is None:
            gradient = view.zero_()
        elif gradient.layout is not torch.strided:
            raise RankError(
                "a parameter has a sparse gradient, which does not fit into one flat buffer",
                fix='ctx.prepare(model, strategy="ddp")',
            )
        found.append(gradient)
    return found


def views_of(flat: Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[Tensor]:
    """Cut a buffer into pieces of the shapes and, for memory formats as channels-last, strides of the parameters."""
    at = 0
    for parameter in parameters:
        # The gradient of a parameter with gaps or overlaps in memory is contiguous.
        dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        strides = parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
        yield flat.as_strided(parameter.shape, strides, flat.storage_offset() + at)
        at += parameter.numel()
