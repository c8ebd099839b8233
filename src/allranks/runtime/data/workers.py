"""Data-loader workers: their number, start, signals and end."""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from allranks.system import cgroups

#: Schedulers, agents and terminals send these signals to the whole process group. Workers ignore them, because the rank
#: still needs them until it has saved.
KEPT_FROM = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: Seconds between a worker's checks that its rank is alive. A dead rank's connections to other ranks stay open while a
#: worker holds copies of them.
_CHECK = 0.5


def allowed_cpus() -> list[int]:
    """Return the numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpus_of(rank: int, members: Sequence[tuple[int, Sequence[int]]]) -> int:
    """Return the number of CPUs of a rank, at least 1.

    A CPU that several ranks of a node share is divided between them. ``members`` holds the node rank and the allowed
    CPUs of each rank.
    """
    node, mine = members[rank]
    there = [set(cpus) for its_node, cpus in members if its_node == node]
    total = sum(1 / sum(cpu in theirs for theirs in there) for cpu in mine)
    # Rounding errors may leave a sum of fractions just below an integer.
    quota = cgroups.quota()
    return max(1, min(math.floor(total + 1e-6), quota // len(there) if quota else len(mine)))


@dataclass(eq=False)
class Pool:
    """Iterates over datasets whose samples are complete batches, in worker processes or in the rank itself.

    Workers outlive signals to the process group, and exit with their rank.

    Attributes:
        workers: processes that fetch; 0: the rank itself does.
        prefetch: batches that each worker has ready.
        pinned: whether batches go into pinned memory, from where a GPU takes them without being waited for.
        finish: called with each batch in the rank itself: pins it, if no worker does, and moves it to the device.
        init: called in each worker with its number.
    """

    workers: int
    prefetch: int
    pinned: bool
    finish: Callable[[Any], Any]
    init: Callable[[int], None] | None = None
    #: Kept for all passes, if there is a sampler.
    _loader: DataLoader[Any] | None = None
    #: Iterators with workers. A script may still hold an abandoned one when it starts the next.
    _iterators: set[Any] = field(default_factory=set)

    def batches(self, dataset: Any, sampler: Any = None) -> Iterator[Any]:
        """Yield the batches of a dataset.

        Workers exit with the pass. With a sampler, which gives the requests for them, they stay for the next pass.
        """
        if not self.workers:
            yield from dataset
            return
        loader = self._loader
        if loader is None:
            loader = DataLoader(
                dataset,
                sampler=sampler,
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=self.workers,
                prefetch_factor=self.prefetch,
                pin_memory=self.pinned,
                persistent_workers=sampler is not None,
                worker_init_fn=partial(_start, self.init, os.getpid()),
                # The loader draws a number per pass, which must not come from the training's generator.
                generator=torch.Generator(),
            )
            if sampler is not None:
                self._loader = loader
            _pools.add(self)
        # Workers inherit the mask, so that no signal can end them before they have their handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, KEPT_FROM)
        try:
            iterator = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._iterators.add(iterator)
        try:
            yield from iterator
        finally:
            if sampler is None:
                self._iterators.discard(iterator)
                _stop_workers(iterator)

    def close(self) -> None:
        """Stop the workers and wait until they are gone. Later use starts new ones."""
        self._loader = None
        while self._iterators:
            _stop_workers(self._iterators.pop())

    def __del__(self) -> None:
        self.close()


#: Pools to close before ``multiprocessing`` joins its children when the process exits.
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def close_pools() -> None:
    """Stop the workers of all loaders."""
    for pool in list(_pools):
        pool.close()


def _stop_workers(iterator: Any) -> None:
    # torch does this when the iterator is collected, which a traceback may delay.
    iterator._shutdown_workers()
    # torch sends SIGTERM to workers stuck in the dataset, and they ignore it.
    for worker in iterator._workers:
        if worker.is_alive():
            worker.kill()
            worker.join()


def _as_it_is(batch: Any) -> Any:
    return batch


def _start(init: Callable[[int], None] | None, rank: int, worker: int) -> None:
    """Set up a worker: disarm signals to the process group, watch the rank, and call the user's function.

    The signals get a no-op handler. They are not ignored or blocked, because programs that a dataset starts would
    inherit that and could not be ended.
    """
    for number in KEPT_FROM:
        signal.signal(number, lambda number, frame: None)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, KEPT_FROM)
    threading.Thread(target=_watch, args=(os.getppid(), rank), name="allranks-watch", daemon=True).start()
    if init is not None:
        init(worker)


def _watch(parent: int, rank: int) -> None:
    """Exit when the rank is gone. Torch's own watch checks every 5 seconds, and only between two batches."""
    orphan = parent == 1 and rank != 1
    while os.getppid() == parent and not orphan:
        time.sleep(_CHECK)
    os._exit(1)
