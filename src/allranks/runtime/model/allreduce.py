"""Averages gradients over ranks: by messages, or through memory that all ranks of a machine see.

Shared memory is quicker than gloo's sockets. Each rank has a block of it: its own gradients, and behind them its slice
of the averages. The ranks write their gradients, meet, add up a slice each, meet, and copy all slices. No rank writes
what another may still read: gradients are read between the two meetings only, and averages from the second meeting to
the first one of the next step. Sums are in the order of ranks, so that they are always the same to the bit.
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

#: Least bytes of gradients with which shared memory is quicker than a message, whose time is mostly system calls.
LEAST = 1 << 20
#: Bytes in front of each block that show that it is the right one.
_TOKEN = 64
#: Numbers that are added up at a time, few enough to stay in the cache.
_CHUNK = 1 << 17


class Message:
    """Parameters of one type whose gradients travel together, divided by the number of ranks before they are summed.

    The gradients are in ``buffer``, of one dimension, and travel in the type ``compress``, or else in their own.
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
        if len(gradients) == 1:  # It may be large: one pass over the memory, not two.
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
        """Write this rank's gradients where the other ranks see them, and average a slice."""
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
    """Make a message through memory that all ranks share; None if it does not pay or the system does not allow it.

    All ranks call it, with buffers of the same size.
    """
    size, world_size = buffer.numel(), distributed.get_world_size()
    if size * buffer.element_size() < LEAST or not hasattr(os, "memfd_create"):
        return None
    blocks = _open_blocks((size + _slice_length(size, world_size)) * buffer.element_size(), world_size, control)
    return SharedMessage(parameters, buffer, blocks, distributed.get_rank()) if blocks else None


def _open_blocks(size: int, world_size: int, control: CpuGroup) -> list[mmap.mmap]:
    """Make a block of so many bytes for each rank, and open all of them; [] on all ranks if one cannot.

    The kernel frees a block with the last process that has it.
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
            if blocks[-1][:_TOKEN] != its_token:  # Of a process of the same number in another container.
                blocks.pop()
    except (OSError, ValueError):  # A block that is missing, or empty.
        blocks = []
    # Also the meeting after which a rank may close what the others have opened.
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
        # A parameter with gaps in memory, or one that overlaps itself, gets a gradient without.
        dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        strides = parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
        yield flat.as_strided(parameter.shape, strides, flat.storage_offset() + at)
        at += parameter.numel()
