"""Small messages between ranks on the CPU, apart from the gradients."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class CpuGroup:
    """Exchanges small values between ranks, over the CPU. Use it as ``ctx.control``.

    All methods are collective: every rank calls them at the same point.

    Attributes:
        group: the gloo process group that it uses, for tensors on the CPU; None in a world of one rank.
    """

    def __init__(self, world_size: int, timeout: timedelta) -> None:
        self._world_size = world_size
        self.group: ProcessGroup | None = None
        if world_size > 1:
            from torch import distributed

            if distributed.get_backend() == "gloo":
                self.group = distributed.group.WORLD
            else:  # The default group does not work on the CPU.
                self.group = distributed.new_group(backend="gloo", timeout=timeout)

    def agree(self, *values: int) -> list[int]:
        """Return the maximum of each value over all ranks."""
        if self.group is None:
            return list(values)
        import torch
        from torch import distributed

        box = torch.tensor(values, dtype=torch.int64)
        distributed.all_reduce(box, distributed.ReduceOp.MAX, group=self.group)
        return [int(value) for value in box.tolist()]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks, on all ranks."""
        if self.group is None:
            return [value]
        from torch import distributed

        box: list[T | None] = [None] * self._world_size
        distributed.all_gather_object(box, value, group=self.group)
        return box  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on all ranks."""
        if self.group is None:
            return value
        from torch import distributed

        box = [value]
        distributed.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.agree(0)

    def release(self) -> None:
        """Drop the group, so that it is gone, with its threads, when torch destroys it.

        A thread of gloo's that frees a tensor needs the interpreter; if that is ending just then, the process
        aborts (seen with torch 2.13, as "terminate called without an active exception").
        """
        self.group = None
