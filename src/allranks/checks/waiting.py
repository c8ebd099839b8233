"""How long preflight waits for jobs of its own, and the signals that come meanwhile."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from allranks.errors import LaunchError
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind, Started
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run
    from allranks.runs.status import Status

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Waiting(NamedTuple):
    """How long to wait for nodes; ``notify`` is called with what happens meanwhile, a line each."""

    seconds: float
    notify: Callable[[str], None]

    def in_vain(self, cluster: str, status: Status) -> str:
        """Return the error that no nodes have come."""
        reason = f": {status.reason}" if status.reason else ""
        return f"{cluster} gave no nodes within {self.seconds:g} s{reason} (--wait SECONDS waits longer)"


@contextlib.contextmanager
def noted() -> Iterator[list[int]]:
    """Record signals in a list, so that none ends a command whose job would stay in the queue.

    The first one restores the handlers: a second one does what it always does. A terminal that is closed sends SIGHUP
    more than once.

    Raises:
        KeyboardInterrupt: Ctrl-C, which was not handled until the end.
        SystemExit: another signal; likewise.
    """
    signals: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        signals.append(number)
        restore(but=signal.SIGHUP)

    def restore(but: int = 0) -> None:
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
        restore()


def _end(number: int) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def end_if_requested(signals: Sequence[int], notify: Callable[[str], None], what: str) -> None:
    """End this command if a signal has come, by KeyboardInterrupt (Ctrl-C) or SystemExit."""
    if signals:
        notify(f"{signal.Signals(signals[0]).name}: {what} is being cancelled")
        _end(signals[0])


class Watcher:
    """Called while a self-test runs; this one does nothing."""

    def interrupted(self) -> int:
        """Return the number of the signal that has come before the start; 0: none has."""
        return 0

    def attach(self, run: Run, plan: Plan, started: Started) -> None:
        """Called when it was started: signals can be passed on."""

    def news(self, run: Run, lines: Sequence[str]) -> None:
        """Called again and again, with what has happened since."""


class Patience(Watcher):
    """Ends a self-test of preflight that waits for nodes for too long, or when a signal comes."""

    def __init__(self, kind: ClusterKind, waiting: Waiting | None, signals: Sequence[int]) -> None:
        self._kind, self._waiting, self._signals = kind, waiting, signals
        self._cluster, self._until = "", math.inf

    def interrupted(self) -> int:
        """Return the first signal that has come."""
        return next(iter(self._signals), 0)

    def attach(self, run: Run, plan: Plan, started: Started) -> None:
        """Start to wait."""
        self._cluster = plan.cluster
        self._until = time.monotonic() + self._waiting.seconds if self._waiting else math.inf

    def news(self, run: Run, lines: Sequence[str]) -> None:
        """Report news; raise LaunchError when it has waited for too long, or the exception of a signal."""
        notify = self._waiting.notify if self._waiting else lambda _: None
        for line in lines:
            notify(line)
        end_if_requested(self._signals, notify, run.record.id)
        handle = run.record.handle
        if self._waiting and handle and handle.job_id and time.monotonic() > self._until:
            self._until = math.inf
            status = self._kind.status(run)
            if status.state is State.PENDING:
                raise LaunchError(self._waiting.in_vain(self._cluster, status))
