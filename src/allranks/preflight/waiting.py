"""How long preflight waits for what it starts itself, and signals that come meanwhile."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from allranks.errors import LaunchError
from allranks.preflight.watcher import Watcher
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind, Started
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run
    from allranks.runs.status import Status

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Waiting:
    """How nodes are waited for.

    Attributes:
        seconds: for how long.
        tell: is called with what happens meanwhile, a line each.
    """

    seconds: float
    tell: Callable[[str], None]

    def in_vain(self, cluster: str, status: Status) -> str:
        """Say that nodes have not come."""
        reason = f": {status.reason}" if status.reason else ""
        return f"{cluster} gave no nodes within {self.seconds:g} s{reason} (--wait SECONDS waits longer)"


@contextlib.contextmanager
def noted() -> Iterator[list[int]]:
    """Give a list for signals, so that none ends a command whose job would stay in the queue.

    The first one gives the handlers back: a second one does what it always does. A terminal that is closed sends SIGHUP
    more than once.

    Raises:
        KeyboardInterrupt: Ctrl-C, of which nobody has taken notice until the end.
        SystemExit: another signal; likewise.
    """
    signals: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        signals.append(number)
        give_back(but=signal.SIGHUP)

    def give_back(but: int = 0) -> None:
        for number, handler in before.items():
            if number != but:
                signal.signal(number, handler)

    before = {number: signal.getsignal(number) for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, note)
    try:
        yield signals
        if signals:
            _end(signals[0])
    finally:
        give_back()


def _end(number: int) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def end_if_asked(signals: Sequence[int], tell: Callable[[str], None], what: str) -> None:
    """End this command if a signal has come.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        SystemExit: another signal.
    """
    if signals:
        tell(f"{signal.Signals(signals[0]).name}: {what} is being cancelled")
        _end(signals[0])


class Patience(Watcher):
    """Looks on while a trial of preflight goes on: no longer than it may wait for nodes, or until a signal comes.

    Args:
        kind: the kind of cluster.
        waiting: how long a scheduler is waited for; None: there is none.
        signals: those that have come, from :func:`noted`.
    """

    def __init__(self, kind: ClusterKind, waiting: Waiting | None, signals: Sequence[int]) -> None:
        self._kind, self._waiting, self._signals = kind, waiting, signals
        self._cluster, self._until = "", math.inf

    def interrupted(self) -> int:
        """Return the first signal that has come."""
        return next(iter(self._signals), 0)

    def attach(self, run: Run, plan: Plan, started: Started) -> None:
        """Begin to wait."""
        self._cluster = plan.cluster
        self._until = time.monotonic() + self._waiting.seconds if self._waiting else math.inf

    def news(self, run: Run, lines: Sequence[str]) -> None:
        """Tell what has happened.

        Raises:
            LaunchError: it has waited for too long.
            KeyboardInterrupt: Ctrl-C.
            SystemExit: another signal.
        """
        tell = self._waiting.tell if self._waiting else lambda _: None
        for line in lines:
            tell(line)
        end_if_asked(self._signals, tell, run.record.id)
        handle = run.record.handle
        if self._waiting and handle and handle.job_id and time.monotonic() > self._until:
            self._until = math.inf
            status = self._kind.status(run)
            if status.state is State.PENDING:
                raise LaunchError(self._waiting.in_vain(self._cluster, status))
