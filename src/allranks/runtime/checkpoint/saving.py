"""A save on its way to the disk, and the thread that takes it there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.errors import AllranksError
from allranks.runtime.checkpoint.tally import Tally
from allranks.runtime.checkpoint.writing import give_way
from allranks.runtime.peer import Peers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from allranks.runtime.control import Control

#: Names of files, with what the manifest says about them.
Written = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Outcome:
    """How a save ended.

    Attributes:
        step: which one it was.
        failure: why it failed, naming the rank; None if it is durable.
        temporary: what is left of it, if it failed.
    """

    step: int
    failure: str | None
    temporary: Path


@dataclass
class _Save:
    """A save that is not over.

    ``future`` is what this rank's thread does for it; None where another rank is at work. ``commit`` is what rank 0
    does when all ranks have written; None when that has begun, or is part of ``future``.
    """

    step: int
    temporary: Path
    future: Future[Written] | None
    commit: Callable[[Written], Written] | None
    several: bool


class Saver:
    """Takes one save at a time to the disk. ``pending`` and ``settle`` are what ranks agree by.

    Args:
        control: of the context.
        rank: this one.
        world_size: number of ranks.
        store: what the ranks share, if there is one: who has nothing to write waits there, however long it takes.
    """

    def __init__(self, control: Control, rank: int, world_size: int = 1, store: Store | None = None) -> None:
        self._control = control
        self._rank = rank
        self._world_size = world_size
        self._tally = Tally(control, store if world_size > 1 else None, Peers(rank, world_size, store))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="allranks-checkpoint", initializer=give_way)
        self._save: _Save | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is not over; the same on all ranks."""
        return self._save is not None

    @property
    def shared(self) -> bool:
        """Whether several ranks write the save that is not over."""
        return self._save is not None and self._save.several

    @property
    def pending(self) -> bool:
        """Whether this rank still works on it."""
        return self._save is not None and self._save.future is not None and not self._save.future.done()

    @property
    def failed(self) -> bool:
        """Whether this rank's part of it failed."""
        return self._failure() is not None

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        """Have the thread do something besides."""
        return self._pool.submit(work)

    def start(
        self,
        step: int,
        temporary: Path,
        write: Callable[[], Written] | None,
        commit: Callable[[Written], Written],
        *,
        several: bool,
    ) -> None:
        """Begin a save; all ranks call it.

        Args:
            step: which one.
            temporary: where it is written.
            write: writes this rank's files, and tells of them; None if it has none.
            commit: makes it count, once everything is written; rank 0 calls it.
            several: whether several ranks write.
        """
        assert self._save is None
        self._save = save = _Save(step, temporary, None, commit, several)
        self._tally.begin(self._world_size if several else 1)
        if not several:
            save.commit = None
            if self._rank == 0:
                assert write is not None
                save.future = self._submit(lambda: commit(write()))
        elif write is not None:
            save.future = self._submit(write)
        else:
            self._tally.done()

    def settle(self, *, failed: bool) -> Outcome | None:
        """Go on when no rank works on the save any more; tell how it ended, or None if rank 0 is to commit it now.

        Args:
            failed: whether a rank has failed; all ranks say the same.
        """
        save = self._save
        assert save is not None
        if failed:
            reasons = [reason for reason in self._control.gather(self._failure()) if reason]
            self._save = None
            return Outcome(save.step, "; ".join(dict.fromkeys(reasons)), save.temporary)
        if save.commit is None:
            self._save = None
            return Outcome(save.step, None, save.temporary)
        commit, save.commit = save.commit, None
        written = self._control.gather(save.future.result() if save.future else {})
        files = {name: file for some in written for name, file in some.items()}
        self._tally.begin(1)
        save.future = self._submit(lambda: commit(files)) if self._rank == 0 else None
        return None

    def finish(self) -> Outcome | None:
        """Wait until the save is over; all ranks call it. None if there was none."""
        outcome = None
        while self._save is not None:
            if self._save.future is not None:
                wait([self._save.future])
            self._tally.wait()
            outcome = self.settle(failed=bool(self._control.agree(int(self.failed))[0]))
        return outcome

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()

    def _submit(self, work: Callable[[], Written]) -> Future[Written]:
        """Have the thread do this rank's part of a save, and tell the others when that is over."""

        def told() -> Written:
            try:
                return work()
            finally:
                tell()

        tell = self._tally.ticket()
        return self._pool.submit(told)

    def _failure(self) -> str | None:
        save = self._save
        if save is None or save.future is None or not save.future.done():
            return None
        error = save.future.exception()
        if error is None:
            return None
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        else:
            reason = error.what if isinstance(error, AllranksError) else f"{type(error).__name__}: {error}"
        return f"rank {self._rank} on {socket.gethostname()}: {reason}"
