"""Requests to end the run: a signal, or the end of the launcher that holds our lifeline.

A request never interrupts what the agent is doing: a message half sent or half read would be lost. It is noted,
and taken up where the agent waits. Only before there can be any rank does a signal end the agent at once.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType

from allranks import contract

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: What schedulers send ahead of the end. It ends nothing here: ranks that listen get it, save, and leave by themselves.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


class StopRequestedError(Exception):
    """Somebody asked for the end of the run, and nobody has taken that up yet. The text says who or what."""


class Stop:
    """The first request to end the run; a later one means that the user is in a hurry.

    Args:
        early: called with the signal that comes before :meth:`ready`; does not return.

    Attributes:
        signal: the signal to end the ranks with, once there is a request.
        why: who or what asked.
        hurry: whether the ranks shall be killed without waiting for them.
        warned: whether a warning came.
    """

    def __init__(self, early: Callable[[Stop], None]) -> None:
        self.signal: signal.Signals | None = None
        self.why = ""
        self.hurry = False
        self.warned = False
        self._early: Callable[[Stop], None] | None = early
        self._lifeline = 0 if os.environ.get(contract.LIFELINE) else None
        self._since = 0.0
        self._is_taken_up = False
        self._warnings: list[signal.Signals] = []

    def listen(self) -> None:
        """Take note of signals from now on."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        for number in WARNINGS:
            signal.signal(number, self._on_warning)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, *WARNINGS))

    def ready(self) -> None:
        """From now on a request is taken up by :meth:`check`."""
        self._early = None

    def check(self) -> None:
        """Take up a request.

        Raises:
            StopRequestedError: there is one, and it has not been taken up before.
        """
        if self.signal is None and self._launcher_is_gone():
            self.request(signal.SIGTERM, "the launcher is gone")
        if self.signal is None or self._is_taken_up:
            return
        self._is_taken_up = True
        raise StopRequestedError(self.why)

    def request(self, number: signal.Signals, why: str) -> None:
        """Request the end as if ``number`` had come, unless somebody did before."""
        if self.signal is None:
            self._note(number, why)

    def take_warnings(self) -> list[signal.Signals]:
        """Give the warnings that came since the last call, each once, to be handed on to the ranks."""
        taken = [self._warnings.pop(0) for _ in range(len(self._warnings))]
        return list(dict.fromkeys(taken))

    def _on_warning(self, number: int, _: FrameType | None) -> None:
        self.warned = True
        self._warnings.append(signal.Signals(number))

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self._note(signal.Signals(number), f"got {signal.Signals(number).name}")
            if self._early:
                self._early(self)
        elif time.monotonic() - self._since > contract.ONE_REQUEST_SECONDS:
            self.hurry = True

    def _note(self, number: signal.Signals, why: str) -> None:
        self.signal, self.why, self._since = number, why, time.monotonic()

    def _launcher_is_gone(self) -> bool:
        if self._lifeline is None or not select.select([self._lifeline], [], [], 0)[0]:
            return False
        return not os.read(self._lifeline, 4096)
