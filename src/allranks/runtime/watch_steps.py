"""Ranks that disagree on the number of steps are named, instead of hanging until the timeout.

A backward pass waits for all ranks. A rank that has left the training loop takes part in no more of them, so a rank
that begins one more would wait for it in vain. Places that come after a loop, such as the end of the context,
are numbered alike on all ranks: whoever is the first at one writes down how many backward passes it has made. A
thread looks once a second whether somebody is at a place ahead that was reached with fewer backward passes than
this rank has begun.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from allranks.errors import RankError
from allranks.runtime.peer import Peers
from allranks.runtime.poll import poll
from allranks.runtime.say import say

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from allranks.runtime.progress import Progress

_VERDICT = "steps/verdict"
#: Between the verdict and the end of this process, which may serve the store: time for the others to read it.
_TIME_TO_READ = 0.5


class Arrival(NamedTuple):
    """The first rank at a place, what it does there, and how many backward passes it has made."""

    rank: int
    backwards: int
    doing: str


class StepWatch:
    """Looks after the number of backward passes of this rank and the others.

    Args:
        rank: of this process.
        world_size: number of ranks.
        progress: holds how many backward passes this rank has begun.
        store: what the ranks share; None where there is none, or one rank only: then nobody is watched.
        seconds: between two looks.
    """

    def __init__(
        self, rank: int, world_size: int, progress: Progress, store: Store | None, seconds: float = 1.0
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._progress = progress
        self._store = store if world_size > 1 else None
        self._peers = Peers(rank, world_size, store)
        self._seconds = seconds
        self._places = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, if nobody does yet."""
        if self._thread is not None or self._store is None or self._over.is_set():
            return
        self._thread = threading.Thread(target=self._watch, args=(self._store,), name="allranks-steps", daemon=True)
        self._thread.start()
        # Not inside the store while the interpreter ends.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * self._seconds)
            atexit.unregister(self.stop)

    def arrive(self, doing: str) -> int:
        """Say that this rank is at the next place, and what it does there; return the place's number.

        Ranks that come with different numbers of backward passes are told of, and not stopped: they have come.
        """
        self._places += 1
        if self._store is None:
            return self._places
        mine = Arrival(self._rank, self._progress.backwards, doing)
        try:
            if self._store.add(_counter(self._places), 1) == 1:
                self._store.set(_first(self._places), json.dumps(mine))
                return self._places
        except RuntimeError:
            return self._places  # The store is gone: whoever needs it next tells.
        if (first := self._read(self._store, self._places)) and first.backwards != mine.backwards:
            say(
                f"warning: rank {first.rank} has made {first.backwards} backward passes, "
                f"rank {mine.rank} {mine.backwards}"
            )
        return self._places

    def leave(self, timeout: timedelta) -> None:
        """Wait until all ranks have come here, however long one needs, but no longer than ``timeout``.

        A rank that has failed, or whose store is gone, is not waited for: its own error is the one to see.

        Raises:
            RankError: another rank goes on with its steps.
        """
        if self._store is None or self._over.is_set():
            return
        place = self.arrive("has left the training loop and closed its context")
        store = self._store
        poll(lambda: self._complete(store, place), timeout.total_seconds())
        self.stop()
        self.raise_verdict()

    def raise_verdict(self) -> None:
        """Raise what a rank has found before it ended, if one has.

        Raises:
            RankError: ranks disagree on the number of steps.
        """
        if self._store is not None and self._has(self._store, _VERDICT):
            raise RankError(**json.loads(self._store.get(_VERDICT)))

    def _complete(self, store: Store, place: int) -> bool | None:
        """Tell whether there is nobody to wait for any more; None: go on waiting."""
        try:
            come = store.add(_counter(place), 0) >= self._world_size
        except RuntimeError:
            return True
        return come or self._has(store, _VERDICT) or self._peers.are_missing() or None

    def _watch(self, store: Store) -> None:
        """Until the end: end this process when it is seen twice in the same hopeless backward pass."""
        suspected = 0
        while not self._over.wait(self._seconds):
            begun = self._progress.backwards
            first = self._read(store, self._places + 1)
            if first is None or begun <= first.backwards:
                suspected = 0
            elif begun == suspected and not self._over.is_set():
                self._end(store, disagreement(first, self._rank, begun))
            else:
                suspected = begun

    def _end(self, store: Store, error: RankError) -> None:
        """End this process, whose main thread hangs inside torch, after telling everybody why."""
        try:
            store.set(_VERDICT, json.dumps({"what": error.what, "why": error.why, "fix": error.fix}))
        except RuntimeError:
            pass  # The store went with the rank that served it; the error is told here.
        try:
            sys.stdout.flush()
            sys.stderr.write(f"error: {error}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass  # There is no other place to tell it.
        time.sleep(_TIME_TO_READ)
        os._exit(error.exit_code)

    def _read(self, store: Store, place: int) -> Arrival | None:
        """Give who came first to a place; None if nobody has, or the store is gone."""
        return Arrival(*json.loads(store.get(_first(place)))) if self._has(store, _first(place)) else None

    @staticmethod
    def _has(store: Store, key: str) -> bool:
        try:
            return store.check([key])
        except RuntimeError:  # torch's DistError is one: the store is gone, and its server's death is told elsewhere.
            return False


def disagreement(first: Arrival, rank: int, begun: int) -> RankError:
    """Make the error for a rank that has begun more backward passes than the first one at a place behind them."""
    return RankError(
        f"ranks disagree on the number of steps: rank {first.rank} {first.doing} after {first.backwards} backward "
        f"passes, rank {rank} has begun {begun}",
        why=f"a backward pass waits for all ranks, so rank {rank} would hang until the timeout",
        fix="give all ranks the same number of batches, as ctx.loader() does also where the samples do not divide",
    )


def _counter(place: int) -> str:
    return f"steps/place/{place}/ranks"


def _first(place: int) -> str:
    return f"steps/place/{place}/first"
