"""Whether the process of another rank is gone: who waits for it in the store would wait for ever.

That is seen on the same machine, and told to the others; of ranks on other machines the agents tell. The end of a rank
need not reach those who wait otherwise: the agent may serve the store, and its SIGTERM to them is only noted once there
are checkpoints.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract, processes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: Said by a rank that leaves because it has failed, or because another one is gone: nobody is to be waited for.
ALL_LEFT = "all-left"


class Peers:
    """The other ranks, for whoever waits for them.

    Args:
        rank: of this process.
        world_size: number of ranks.
        store: what the ranks share; None where there is none.
    """

    def __init__(self, rank: int, world_size: int, store: Store | None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store if world_size > 1 else None
        self._names: dict[int, str] = {}

    def announce(self) -> None:
        """Say which process this rank is."""
        if self._store is not None:
            self._store.set(_key(self._rank), own_name())

    def is_gone(self, rank: int) -> bool:
        """Tell whether a rank is a process of this machine and has ended."""
        if self._store is None:
            return False
        if rank not in self._names and self._store.check([_key(rank)]):
            self._names[rank] = self._store.get(_key(rank)).decode()
        return rank in self._names and is_gone(self._names[rank])

    def are_missing(self) -> bool:
        """Tell whether nobody is to be waited for any more, because a rank is gone; say it to the others as well.

        Where the store is gone, so are those who would have been waited for.
        """
        store = self._store
        if store is None:
            return False
        try:
            if store.check([ALL_LEFT]):
                return True
            if _agents_tell(store) or any(self.is_gone(rank) for rank in range(self._world_size)):
                store.set(ALL_LEFT, "1")
                return True
        except RuntimeError:  # torch's DistError is one.
            return True
        return False

    def leave_waiting(self) -> None:
        """Say that nobody is to be waited for, because this rank has failed."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(ALL_LEFT, "1")


def _agents_tell(store: Store) -> bool:
    """Tell whether an agent has told the ranks that one of them is gone: in the store itself, without our prefix."""
    whole = getattr(store, "underlying_store", None)
    return whole is not None and bool(whole.check([contract.RANK_GONE]))


def _key(rank: int) -> str:
    return f"process/{rank}"


def own_name() -> str:
    """Name this process so that no other one is taken for it, neither a later one nor one of another machine."""
    return json.dumps([_machine(), os.getpid(), processes.started(os.getpid())])


def is_gone(name: str) -> bool:
    """Tell whether the process that gave its :func:`own_name` has ended; False where it cannot be seen from here."""
    machine, pid, started = json.loads(name)
    return machine == _machine() and started is not None and processes.started(pid) != started


def _machine() -> list[str]:
    """Name what process ids are counted in: containers of one machine may each have their own."""
    try:
        return [processes.boot_id(), str(Path("/proc/self/ns/pid").readlink())]
    except OSError:
        return []
