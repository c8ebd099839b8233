"""Requests to save and exit: a signal, or the end of the job's time.

A request never interrupts the rank. This module records it, and the ranks act on it at the next step at which they
agree (see ``runtime/checkpoint``). Warnings are recorded from ``allranks.init`` on, since they would kill a rank that
still loads data. SIGTERM, Ctrl-C and SIGHUP are recorded only once there is a checkpointer: before that nothing is
lost, and a script without one must end.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from allranks import contract
from allranks.errors import RankEnvironmentError
from allranks.system import schedulers
from allranks.system.processes import catches

#: Signals of schedulers before a time limit or a preemption.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
#: Signals of a terminal: the first is a request, the second has its usual effect.
TYPED = (signal.SIGINT, signal.SIGHUP)
#: Signals that are stop requests once there is a checkpointer.
SIGNALS = (signal.SIGTERM, *WARNINGS, *TYPED)


class StopListener:
    """Records signals until :meth:`close`; the script's own handlers are called as well.

    A process started with nohup, or in the background, keeps ignoring the terminal's signals. Outside the main thread
    Python cannot set handlers, and only the end of the job's time is a request.

    Attributes:
        leave_at: when to exit for lack of time, in seconds since 1970; None until signals are requests.
    """

    def __init__(self) -> None:
        self.leave_at: float | None = None
        self._received: dict[signal.Signals, float] = {}  # signal -> when it came first; the first one is the reason
        self._before: dict[signal.Signals, Any] = {}

    def handle(self, numbers: Iterable[signal.Signals]) -> None:
        """Set the handlers, even if a library has replaced them or restored earlier ones."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            there = signal.getsignal(number)
            if there != self._record and (number not in TYPED or there is not signal.SIG_IGN):
                self._before[number] = signal.signal(number, self._record)

    def requested(self) -> str | None:
        """Return why this rank must save and exit; None without a request."""
        if self.leave_at is None:
            return None
        if self._received:
            return f"got {next(iter(self._received)).name}"
        return "the job's time is nearly over" if time.time() > self.leave_at else None

    def close(self) -> None:
        """Restore the previous handlers, except where the script has set its own since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._record:
                # None: the handler was not set from Python, and cannot be restored from Python.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        theirs = self._before.get(name)
        now = time.monotonic()
        first = self._received.setdefault(name, now)
        if name in TYPED and now - first > contract.ONE_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL if theirs is None else theirs)
            signal.raise_signal(number)
        elif callable(theirs) and theirs is not signal.default_int_handler:
            theirs(number, frame)


_listener = StopListener()


def note_warnings() -> None:
    """Record warnings that the script does not handle; they become requests when :func:`listen` is called."""
    _listener.handle(number for number in WARNINGS if not catches(os.getpid(), number))


def listen(margin: float = 60.0) -> None:
    """Treat signals as stop requests, including warnings that came before.

    Args:
        margin: seconds before the end of the job's time at which to exit; at most half of the time that is left now,
            or a short job would do nothing but exit.

    Raises:
        RankEnvironmentError: the variable that holds the end of the job's time is not a number.
    """
    if _listener.leave_at is None:
        end = _end_time()
        _listener.leave_at = end - min(margin, max(0.0, end - time.time()) / 2)
    _listener.handle(SIGNALS)


def requested() -> str | None:
    """Return why this rank must save and exit; None without a request, or before :func:`listen`."""
    return _listener.requested()


def close() -> None:
    """Stop listening, and forget all requests."""
    global _listener
    _listener.close()
    _listener = StopListener()


def _end_time() -> float:
    names = [contract.END_TIME]
    # Under a scheduler of another package allranks sets its own variable.
    for _, environment in schedulers.environments(others=contract.RUN_ID not in os.environ):
        names += environment.end_time
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return math.inf
    try:
        return float(os.environ[name])
    except ValueError:
        raise RankEnvironmentError(
            f"invalid number: {name}={os.environ[name]}",
            why="it says when the job's time ends, in seconds since 1970",
            fix=f"unset {name}, or correct it",
        ) from None
