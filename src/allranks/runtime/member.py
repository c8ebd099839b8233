"""Who a rank is, its device, and the way to close everything properly."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from allranks import contract
from allranks.runtime.membership import abort, leave_last
from allranks.runtime.peer import Peers

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from allranks.runtime.membership import Membership


@dataclass(frozen=True)
class Member:
    """One rank of a running job: the part of :class:`Context` that needs no training.

    Attributes:
        rank: number of this rank, from 0.
        local_rank: number of this rank on its node, from 0.
        world_size: number of ranks.
        local_world_size: number of ranks on this node.
        node_rank: number of this node, from 0.
        device: device of this rank.
        backend: backend of the process group.
        environment: what identified the rank: torchrun (also for ``allranks run``), Slurm, PBS, Open MPI, MPICH or
            single process.
        master_addr: host of rank 0.
        restart: number of times that the ranks were restarted in this allocation.
        seed: seed of the job, the same on all ranks; None if ``init`` got ``seed=None``.
        rank_seed: seed of this rank's random generators; None likewise.
        timeout: how long ranks wait for each other.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str
    environment: str
    master_addr: str
    restart: int = 0
    seed: int | None = None
    rank_seed: int | None = None
    timeout: timedelta = timedelta(seconds=600)
    _membership: Membership | None = field(default=None, repr=False)
    #: What to call when the context is closed, on all ranks and while they still have each other; last in, first out.
    closing: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _closed: list[bool] = field(default_factory=list, repr=False)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes what is needed only once."""
        return self.rank == 0

    @property
    def terminal(self) -> bool:
        """True if the output is shown on a terminal, so that a progress bar on stderr makes sense."""
        watched = os.environ.get(contract.TERMINAL)
        return watched == "1" if watched else sys.stderr.isatty()

    def print(self, *values: object) -> None:
        """Print a line on rank 0 only, and flush it. Ranks need not all call it."""
        if self.is_main:
            sys.stdout.write(" ".join(map(str, values)) + "\n")
            sys.stdout.flush()

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        from torch import distributed

        distributed.barrier()

    def sum(self, *values: float) -> list[float]:
        """Sum each number over all ranks, in double precision, with one message for all of them.

        For a mean, sum the values and their count, and divide: that is right also if ranks have different numbers of
        samples.

        Args:
            values: numbers of this rank; as many on each rank.

        Returns:
            The sums, on all ranks.
        """
        import torch
        from torch import distributed

        # Apple's GPUs have no double precision.
        device = torch.device("cpu") if self.device.type == "mps" else self.device
        total = torch.tensor(values, dtype=torch.float64, device=device)
        distributed.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def close(self) -> None:
        """Leave the process group. Calling it again does nothing.

        A group that the script had started itself before ``init`` stays as it is. Call it on all ranks and
        at a point that all of them reach; after an error in one rank, leave by the exception instead.
        What goes on in the background, such as writing a checkpoint, is completed before.
        """
        while not self._closed and self.closing:
            self.closing.pop()()
        self._release()
        membership = self._leave()
        if membership is None:
            return
        from torch import distributed

        if membership.ours and distributed.is_initialized():
            distributed.destroy_process_group()
        if membership.store is not None:
            leave_last(membership.store, membership.serves, self.world_size)

    def abandon(self) -> None:
        """Leave without waiting for anybody, because this rank has failed.

        Destroying a group waits for what is in flight, which never ends when this rank was part of it and the
        others wait for this one. NCCL can abort. Gloo cannot (seen with torch 2.13: abort, destroy and the
        destructor at exit all wait until the other side gives up), so the group is kept alive until the
        process is gone, which closes its connections.
        """
        membership = self._leave()
        if membership is None or not membership.ours:
            return
        from torch import distributed

        if distributed.is_initialized():
            abort(self.backend)
        if membership.store is not None:
            Peers(self.rank, self.world_size, membership.store).leave_waiting()

    def __enter__(self) -> Self:
        """Give the context itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error, which goes on its way, leave without waiting for the other ranks."""
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()
        else:
            self.abandon()

    def _release(self) -> None:
        """Let go of what holds the process group."""

    def _leave(self) -> Membership | None:
        """Mark the context as closed; give its membership the first time only."""
        if self._closed:
            return None
        self._closed.append(True)
        if self._membership is not None:
            self._membership.on_close()
        return self._membership
