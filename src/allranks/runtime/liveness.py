"""Whether the process of another rank still exists: a rank that waits in the store for a dead one would wait for ever.

A rank sees deaths on its own machine and publishes them in the store; agents report those on other machines. Nothing
else need end the wait: the agent may serve the store, and a rank only notes its SIGTERM once there are checkpoints.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from allranks import contract
from allranks.system import processes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.25
#: Key that a rank sets when it has failed or another one is gone: no rank waits for others from then on.
ALL_LEFT = "all-left"


class Peers:
    """The other ranks of the store, and whether they are alive."""

    def __init__(self, rank: int, world_size: int, store: Store) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._names: dict[int, str] = {}

    def announce(self) -> None:
        """Publish the identity of this process."""
        self._store.set(f"process/{self._rank}", own_name())

    def is_gone(self, rank: int) -> bool:
        """Return True if a rank was a process of this machine and has exited."""
        key = f"process/{rank}"
        if rank not in self._names and self._store.check([key]):
            self._names[rank] = self._store.get(key).decode()
        return rank in self._names and is_gone(self._names[rank])

    def are_missing(self) -> bool:
        """Return True if a rank, or the store, is gone, so that waiting is in vain; publish that in the store."""
        store = self._store
        try:
            if store.check([ALL_LEFT]):
                return True
            # Agents set their key in the store itself, without our prefix.
            whole = getattr(store, "underlying_store", None)
            reported = whole is not None and whole.check([contract.RANK_GONE])
            if reported or any(self.is_gone(rank) for rank in range(self._world_size)):
                store.set(ALL_LEFT, "1")
                return True
        except RuntimeError:  # torch's DistError is one.
            return True
        return False

    def publish_failure(self) -> None:
        """End the waits of all ranks, because this one has failed."""
        with suppress(RuntimeError):
            self._store.set(ALL_LEFT, "1")


def own_name() -> str:
    """Return a name of this process that no later process and none of another machine has."""
    return json.dumps([_machine(), os.getpid(), processes.started(os.getpid())])


def is_gone(name: str) -> bool:
    """Return True if the process with this :func:`own_name` has exited; False if it cannot be seen from here."""
    machine, pid, started = json.loads(name)
    return machine == _machine() and started is not None and processes.started(pid) != started


def _machine() -> list[str]:
    """Identify the namespace of process ids: containers of one machine may each have their own."""
    try:
        return [processes.boot_id(), str(Path("/proc/self/ns/pid").readlink())]
    except OSError:
        return []


def poll(query: Callable[[], T | None], seconds: float | None = None) -> T | None:
    """Call ``query`` with growing pauses until it returns something other than None; return None after ``seconds``.

    A wait inside the store would keep its connection from the other threads of this process.
    """
    end = None if seconds is None else time.monotonic() + seconds
    pause = _SHORTEST_PAUSE
    while (found := query()) is None:
        if end is not None and time.monotonic() >= end:
            return None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return found
