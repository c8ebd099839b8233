"""Processes that fetch batches beside the training: how many, and how they live and end."""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from allranks.probe import cgroups

#: Schedulers, agents and terminals send these to the whole process group: the rank saves and leaves, and needs its
#: workers until then.
KEPT_FROM = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: Seconds between two looks of a worker whether its rank is still there. A dead rank's connections to the other
#: ranks stay open as long as a worker holds a copy of them.
_LOOK = 0.5


def allowed_cpus() -> list[int]:
    """Give the numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpus_of(rank: int, members: Sequence[tuple[int, Sequence[int]]]) -> int:
    """Give the number of CPUs that a rank has for itself, at least 1.

    A CPU that several ranks of a node may use is shared out between them: ranks bound to CPUs of their own have
    these, ranks that may use the whole machine have their part of it.

    Args:
        rank: whose CPUs.
        members: node rank and allowed CPUs of each rank.
    """
    node, mine = members[rank]
    there = [set(cpus) for its_node, cpus in members if its_node == node]
    total = sum(1 / sum(cpu in theirs for theirs in there) for cpu in mine)
    # A sum of thirds may lie a hair below the whole number.
    quota = cgroups.quota()
    return max(1, min(math.floor(total + 1e-6), quota // len(there) if quota else len(mine)))


class Pool:
    """A data loader of torch's whose workers outlive signals to the process group and end with their rank.

    Args:
        make: makes the data loader, from a function to call in each worker.
        init: a function of the user's to call in each worker, with its number.
    """

    def __init__(self, make: Callable[[Callable[[int], None]], DataLoader[Any]], init: Callable[[int], None] | None):
        self._loader: DataLoader[Any] | None = None
        self._make = make
        self._init = init
        self._iterator: Any = None

    def batches(self) -> Iterator[Any]:
        """Give the batches, from workers that are started now if there are none."""
        if self._loader is None:
            self._loader = self._make(WorkerStart(self._init))
            _pools.add(self)
        # Workers inherit it, and so have no instant in which a signal could end them.
        with _blocked():
            self._iterator = iter(self._loader)
        return self._iterator  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the workers and wait until they are gone. Later use starts new ones."""
        iterator, self._iterator, self._loader = self._iterator, None, None
        # Torch does it when the iterator is collected, which may be late: a traceback can hold it.
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is None:
            return
        shutdown()
        # Torch ends those that are stuck in the dataset by SIGTERM, which they do not listen to.
        for worker in getattr(iterator, "_workers", ()):
            if worker.is_alive():
                worker.kill()
                worker.join()

    def __del__(self) -> None:
        self.close()


#: At the end of the process too, and before ``multiprocessing`` waits for its children there.
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


@contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, KEPT_FROM)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerStart:
    """What a worker does first: it goes deaf to signals for the whole group, and watches its rank.

    The signals get a handler that does nothing, and are neither ignored nor blocked: programs that a dataset starts
    would inherit that, and could not be ended.

    Args:
        init: a function of the user's that comes after it.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init
        self._rank = os.getpid()

    def __call__(self, worker: int) -> None:
        """Run in the worker of this number."""
        for number in KEPT_FROM:
            signal.signal(number, _do_nothing)
            signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, KEPT_FROM)
        threading.Thread(target=_watch, args=(os.getppid(), self._rank), name="allranks-watch", daemon=True).start()
        if self._init is not None:
            self._init(worker)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Be there."""


def _watch(parent: int, rank: int) -> None:
    """Leave when the rank is gone. Torch's own watch looks every 5 seconds, and only between two batches."""
    orphan = parent == 1 and rank != 1
    while os.getppid() == parent and not orphan:
        time.sleep(_LOOK)
    os._exit(1)
