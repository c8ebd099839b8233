"""Requests to save and leave: a signal, or the end of the time that the job was given.

A request never interrupts what the rank is doing. It is noted here, and taken up at the next step on which all
ranks agree (see ``runtime/checkpoint``).
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from allranks import contract
from allranks.errors import RankEnvironmentError

#: What schedulers send ahead of a time limit or a preemption. Ctrl-C stays what it is.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
#: When the job will be ended, in seconds since 1970: our own word, then Slurm's (sbatch(1), OUTPUT ENVIRONMENT).
_END_TIMES = (contract.END_TIME, "SLURM_JOB_END_TIME")


class Stop:
    """The requests to this process. One of them exists for as long as somebody listens.

    Attributes:
        leave_at: when to leave for lack of time, in seconds since 1970; infinite without a limit.
    """

    def __init__(self, margin: float) -> None:
        self.leave_at = _end_time() - margin
        self._received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Take note of signals from now on; a handler that the script has set itself is called as well.

        Outside the main thread Python cannot do this, and only the time counts.
        """
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def requested(self) -> str | None:
        """Tell why this rank is to save and leave, or give None."""
        if self._received:
            return f"got {self._received[0].name}"
        return "the job's time is nearly over" if time.time() > self.leave_at else None

    def close(self) -> None:
        """Put back what handled the signals before."""
        for number, handler in self._before.items():
            # None: a handler that was not set from Python, which cannot be set from Python either.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))
        theirs = self._before.get(signal.Signals(number))
        if callable(theirs):
            theirs(number, frame)


_listening: list[Stop] = []


def listen(margin: float = 60.0) -> None:
    """Listen for requests to stop, if nobody does yet.

    Args:
        margin: seconds before the end of the job's time at which to leave.

    Raises:
        RankEnvironmentError: the variable that holds the end of the job's time is no number.
    """
    if not _listening:
        stop = Stop(margin)
        stop.listen()
        _listening.append(stop)


def requested() -> str | None:
    """Tell why this rank is to save and leave, or give None; also if nobody listens."""
    return _listening[0].requested() if _listening else None


def close() -> None:
    """Listen no more, and forget what was requested."""
    while _listening:
        _listening.pop().close()


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
