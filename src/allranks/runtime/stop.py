"""Requests to save and leave: a signal, or the end of the time that the job was given.

A request never interrupts what the rank is doing. It is noted here, and taken up at the next step on which all
ranks agree (see ``runtime/checkpoint``). Warnings are noted from ``allranks.init`` on, since a rank that is still
loading its data would die of them; SIGTERM, Ctrl-C and the end of the terminal only once there is a checkpointer:
before, nothing would be lost, and a script that never makes one has to end.
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
from allranks.processes import catches

#: What schedulers send ahead of a time limit or a preemption.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
#: What a person at a terminal sends: the first is a request, the second does what it always does.
TYPED = (signal.SIGINT, signal.SIGHUP)
#: What asks a training that saves to stop.
SIGNALS = (signal.SIGTERM, *WARNINGS, *TYPED)
#: When the job will be ended, in seconds since 1970: our own word, then Slurm's (sbatch(1), OUTPUT ENVIRONMENT).
_END_TIMES = (contract.END_TIME, "SLURM_JOB_END_TIME")


class Stop:
    """The requests to this process, from :meth:`listen` to :meth:`close`.

    Args:
        leave_at: when to leave for lack of time, in seconds since 1970; infinite without a limit.
    """

    def __init__(self, leave_at: float = math.inf) -> None:
        self._leave_at = leave_at
        self._received: dict[signal.Signals, float] = {}  # signal -> when it came first; the first one is the reason
        self._before: dict[signal.Signals, Any] = {}

    def listen(self, numbers: Iterable[signal.Signals]) -> None:
        """Take note of signals from now on; a handler that the script has set itself is called as well.

        What a terminal sends and this process ignores stays ignored: it was started with nohup, or in the background.
        Outside the main thread Python cannot do this, and only the time counts.
        """
        if threading.current_thread() is threading.main_thread():
            heard = [n for n in numbers if n not in TYPED or signal.getsignal(n) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}

    def requested(self) -> str | None:
        """Tell why this rank is to save and leave, or give None."""
        if self._received:
            return f"got {next(iter(self._received)).name}"
        return "the job's time is nearly over" if time.time() > self._leave_at else None

    def close(self) -> None:
        """Put back what handled the signals before, but for those that the script has taken since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                # None: a handler that was not set from Python, which cannot be set from Python either.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        theirs = self._before.get(name)
        now = time.monotonic()
        first = self._received.setdefault(name, now)
        if name in TYPED and now - first > contract.ONE_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL if theirs is None else theirs)
            signal.raise_signal(number)
        elif callable(theirs) and theirs is not signal.default_int_handler:
            theirs(number, frame)


#: Who notes warnings, and who listens to all signals: at most one of each.
_warned: list[Stop] = []
_listening: list[Stop] = []


def note_warnings() -> None:
    """Note warnings that this process does not catch itself, until somebody listens for requests to stop."""
    if not _warned:
        stop = Stop()
        stop.listen(number for number in WARNINGS if not catches(os.getpid(), number))
        _warned.append(stop)


def listen(margin: float = 60.0) -> None:
    """Listen for requests to stop, if nobody does yet; warnings that were noted before are requests.

    Args:
        margin: seconds before the end of the job's time at which to leave; at most half of the time that is left now,
            or a short job would do nothing but leave.

    Raises:
        RankEnvironmentError: the variable that holds the end of the job's time is no number.
    """
    if not _listening:
        end = _end_time()
        stop = Stop(end - min(margin, max(0.0, end - time.time()) / 2))
        stop.listen(SIGNALS)
        _listening.append(stop)


def requested() -> str | None:
    """Tell why this rank is to save and leave, or give None; also if nobody listens."""
    if not _listening:
        return None
    return next(filter(None, [stop.requested() for stop in (*_warned, *_listening)]), None)


def close() -> None:
    """Listen no more, and forget what was requested."""
    for stops in (_listening, _warned):
        while stops:
            stops.pop().close()


def _end_time() -> float:
    name = next((name for name in _END_TIMES if os.environ.get(name)), None)
    if name is None:
        return math.inf
    try:
        return float(os.environ[name])
    except ValueError:
        raise RankEnvironmentError(
            f"{name}={os.environ[name]} is no number",
            why="it says when the job's time ends, in seconds since 1970",
            fix=f"unset {name}, or correct it",
        ) from None
