"""The other ranks: whether their processes are alive, and whether they make the same number of steps.

A rank that waits in the store for a dead one would wait for ever. So a rank publishes deaths on its own machine in the
store, and agents publish those on other machines. Nothing else is sure to end the wait: the agent may serve the store,
and a rank only records SIGTERM once there are checkpoints.

A backward pass waits for all ranks. If one rank has left the training loop and another starts one more backward pass,
that one hangs. Places after a loop, such as the end of the context, have the same numbers on all ranks: the first rank
at a place records its number of backward passes in the store. A thread checks once a second whether a rank is at a
later place with fewer backward passes than this rank has started. The error then names the ranks that disagree, instead
of a hang until the timeout.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from allranks import contract
from allranks.errors import RankError
from allranks.runtime import log
from allranks.system import processes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from allranks.runtime.progress import Progress

T = TypeVar("T")

_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.25
#: Key that a rank sets when it has failed or another one is gone: all ranks stop waiting for others.
ALL_LEFT = "all-left"
_VERDICT = "steps/verdict"
#: Seconds for the others to read the verdict, before this process, which may serve the store, exits.
_TIME_TO_READ = 0.5


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
        """Return True if a rank or the store is gone, so that waiting is useless; publish that in the store."""
        store = self._store
        try:
            if store.check([ALL_LEFT]):
                return True
            # Agents set their key without our prefix.
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
    """Return a name that is unique to this process, over time and machines."""
    return json.dumps([_machine(), os.getpid(), processes.started(os.getpid())])


def is_gone(name: str) -> bool:
    """Return True if the process with this :func:`own_name` has exited; False if it is not visible from here."""
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

    A wait inside the store would block its connection for the other threads of this process.
    """
    end = None if seconds is None else time.monotonic() + seconds
    pause = _SHORTEST_PAUSE
    while (found := query()) is None:
        if end is not None and time.monotonic() >= end:
            return None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return found


class FirstArrival(NamedTuple):
    """The first rank at a place, its number of backward passes, and what it does there."""

    rank: int
    backwards: int
    doing: str


class StepWatch:
    """Compares the number of backward passes of this rank with the others."""

    def __init__(self, rank: int, world_size: int, progress: Progress, store: Store, seconds: float = 1.0) -> None:
        self._rank = rank
        self._world_size = world_size
        self._progress = progress
        self._store = store
        self._peers = Peers(rank, world_size, store)
        self._seconds = seconds
        self._places = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it is running."""
        if self._thread is not None or self._world_size == 1 or self._over.is_set():
            return
        self._thread = threading.Thread(target=self._watch, name="allranks-steps", daemon=True)
        self._thread.start()
        # The thread must not be inside the store while the interpreter exits.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop the thread."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * self._seconds)
            atexit.unregister(self.stop)

    def arrive(self, doing: str) -> int:
        """Record that this rank is at the next place, and what it does there; return the place's number.

        If ranks arrive with different numbers of backward passes, it only warns, because none of them hangs.
        """
        self._places += 1
        mine = FirstArrival(self._rank, self._progress.backwards, doing)
        try:
            if self._store.add(f"steps/place/{self._places}/ranks", 1) == 1:
                self._store.set(f"steps/place/{self._places}/first", json.dumps(mine))
                return self._places
            first = self._first(self._places)
        except RuntimeError:
            return self._places  # The store is gone: its next user reports it.
        if first and first.backwards != mine.backwards:
            log(
                f"warning: rank {first.rank} has made {first.backwards} backward passes, "
                f"rank {mine.rank} {mine.backwards}"
            )
        return self._places

    def leave(self, timeout: timedelta) -> None:
        """Wait until all ranks have arrived here, but no longer than ``timeout``.

        The wait ends if a rank has failed or the store is gone: the user should see that rank's error.

        Raises:
            RankError: another rank continues with its steps.
        """
        if self._over.is_set():
            return
        place = self.arrive("has left the training loop and closed its context")
        poll(lambda: self._complete(place), timeout.total_seconds())
        self.stop()
        self.raise_verdict()

    def raise_verdict(self) -> None:
        """Raise the error that another rank published before it exited, if any."""
        if self._has(_VERDICT):
            raise RankError(**json.loads(self._store.get(_VERDICT)))

    def _complete(self, place: int) -> bool | None:
        """Return True if all ranks have arrived, or one is gone; None to keep waiting."""
        try:
            complete = self._store.add(f"steps/place/{place}/ranks", 0) >= self._world_size
        except RuntimeError:
            return True
        return complete or self._has(_VERDICT) or self._peers.are_missing() or None

    def _watch(self) -> None:
        """End this process if two checks in a row find it in the same backward pass that cannot complete."""
        suspected = 0
        while not self._over.wait(self._seconds):
            started = self._progress.backwards
            first = self._first(self._places + 1)
            if first is None or started <= first.backwards:
                suspected = 0
            elif started == suspected and not self._over.is_set():
                self._end(first, started)
            else:
                suspected = started

    def _end(self, first: FirstArrival, started: int) -> None:
        """End this process, whose main thread hangs inside torch, after reporting why to all ranks."""
        error = RankError(
            f"ranks disagree on the number of steps: rank {first.rank} {first.doing} after {first.backwards} backward "
            f"passes, rank {self._rank} has started {started}",
            why=f"a backward pass waits for all ranks, so rank {self._rank} would hang until the timeout",
            fix="give all ranks the same number of batches, as ctx.loader() does also where the samples do not divide",
        )
        try:
            self._store.set(_VERDICT, json.dumps(vars(error)))
        except RuntimeError:
            pass  # The store went with the rank that served it; the error is reported here.
        try:
            sys.stdout.flush()
            sys.stderr.write(f"error: {error}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass
        time.sleep(_TIME_TO_READ)
        os._exit(error.exit_code)

    def _first(self, place: int) -> FirstArrival | None:
        """Return the first rank at a place; None if there is none yet, or the store is gone."""
        key = f"steps/place/{place}/first"
        return FirstArrival(*json.loads(self._store.get(key))) if self._has(key) else None

    def _has(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except RuntimeError:  # DistError is a subclass: the store is gone, which is reported elsewhere.
            return False
