"""Gradients averaged through memory that all ranks of a machine see, where gloo would send them through sockets.

Each rank has a block of memory: its own gradients, and behind them its slice of the averages. The ranks write their
gradients, meet, add up a slice each, meet, and copy all slices. Nobody writes what another may still read: gradients
are read between the two meetings only, and averages from the second meeting to the first one of the next step. Sums
are in the order of ranks, so that they are the same to the bit whenever they are made.
"""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed, nn

from allranks.runtime.model.buffer import gradient, views_of

if TYPE_CHECKING:
    from allranks.runtime.control import Control

#: Bytes of gradients from which on it is quicker than a message, whose time is mostly spent in system calls.
LEAST = 1 << 20
#: In front of each block: what shows that it is the right one.
_TOKEN = 64
#: Numbers that are added up at a time, few enough to stay in the cache.
_CHUNK = 1 << 17


class Blocks:
    """The blocks of all ranks, opened by each of them. The kernel frees a block with the last process that has it.

    Args:
        size: bytes of a block.
        control: the ranks, which are all on this machine.

    Raises:
        OSError: this rank cannot make its block or open another's.
    """

    def __init__(self, size: int, control: Control, rank: int) -> None:
        self.memory: list[mmap.mmap] = []
        token = secrets.token_bytes(_TOKEN)
        descriptor, failure = -1, None
        try:
            descriptor = os.memfd_create("allranks-gradients")
            os.truncate(descriptor, _TOKEN + size)
            os.pwrite(descriptor, token, 0)
        except OSError as error:
            failure = error
        try:
            told = control.gather((os.getpid(), descriptor, token))
            if failure is None:
                self.memory = [_open(path, token) for path, token in map(_place, told)]
        except OSError as error:
            failure = error
        finally:
            control.barrier()  # Nobody closes what another is about to open.
            if descriptor >= 0:
                os.close(descriptor)
        if failure is not None:
            raise failure


def _place(told: tuple[int, int, bytes]) -> tuple[str, bytes]:
    pid, descriptor, token = told
    return f"/proc/{pid}/fd/{descriptor}", token


def _open(path: str, token: bytes) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    if memory[:_TOKEN] != token:  # Of a process of the same number in another container.
        raise OSError(f"{path} is another rank's")
    return memory


class SharedBuffer:
    """The gradients of all parameters of one type of number; stands for :class:`Buffer` where memory is shared.

    Args:
        parameters: that get gradients.
        blocks: of all ranks.
        rank: this one.
    """

    large: tuple[()] = ()

    def __init__(self, parameters: list[nn.Parameter], blocks: Blocks, rank: int) -> None:
        size, dtype = sum(map(nn.Parameter.numel, parameters)), parameters[0].dtype
        world_size = len(blocks.memory)
        part = slice_length(size, world_size)
        everything = [torch.frombuffer(memory, dtype=dtype, offset=_TOKEN) for memory in blocks.memory]
        self.gradients = torch.zeros(size, dtype=dtype)
        self._parameters = parameters
        self._views = list(views_of(self.gradients, parameters))
        self._shared_views = list(views_of(everything[rank][:size], parameters))
        mine = slice(rank * part, (rank + 1) * part)
        self._inputs = [each[:size][mine] for each in everything]
        self._average = everything[rank][size : size + self._inputs[0].numel()]
        self._results: tuple[Tensor, ...] = torch.split(self.gradients, part)
        self._averages = [
            each[size : size + result.numel()] for each, result in zip(everything, self._results, strict=False)
        ]
        self._share = 1.0 / world_size
        self._meeting = torch.zeros(1)

    def send(self) -> None:
        """Write this rank's gradients where the others see them, and average a slice."""
        gathered = [gradient(parameter, view) for parameter, view in zip(self._parameters, self._views, strict=True)]
        torch._foreach_copy_(self._shared_views, gathered)
        distributed.all_reduce(self._meeting)
        slices: list[tuple[Tensor, ...]] = [torch.split(each, _CHUNK) for each in (self._average, *self._inputs)]
        for average, *inputs in zip(*slices, strict=True):
            torch.add(inputs[0], inputs[1], out=average)
            for more in inputs[2:]:
                average.add_(more)
            average.mul_(self._share)

    def receive(self, _: None) -> None:
        """Take the averages of all slices, and make the gradients of the parameters views of them."""
        distributed.all_reduce(self._meeting)
        for result, average in zip(self._results, self._averages, strict=True):
            result.copy_(average)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view


def slice_length(size: int, world_size: int) -> int:
    """Give the length of a rank's slice; the last ones may be shorter, or empty."""
    return -(-size // world_size)


def make_shared(parameters: list[nn.Parameter], control: Control, rank: int) -> SharedBuffer | None:
    """Make a buffer that all ranks of this machine share; None where it does not pay or the system does not let us.

    All ranks call it, with parameters of the same sizes.
    """
    size, item = sum(map(nn.Parameter.numel, parameters)), parameters[0].element_size()
    world_size = distributed.get_world_size()
    if size * item < LEAST or not hasattr(os, "memfd_create"):
        return None
    blocks = None
    with suppress(OSError):
        blocks = Blocks((size + slice_length(size, world_size)) * item, control, rank)
    if control.agree(int(blocks is None))[0]:
        return None
    assert blocks is not None
    return SharedBuffer(parameters, blocks, rank)
