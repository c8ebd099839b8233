"""Requests to stop the run: a signal, or the death of the launcher that holds our lifeline.

A request never interrupts the agent, which could lose a message half sent or read. It is noted, and handled where the
agent waits. Only before the first rank can exist does a signal end the agent at once.
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
#: Signals that schedulers send before the time limit. The agent forwards them to ranks that handle them.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


class StopRequestedError(Exception):
    """A stop of the run was requested, and not handled yet. The text names the source."""


class StopRequest:
    """The first request to stop the run; a second one means: kill the ranks now.

    ``early``, which does not return, handles a signal that comes before :meth:`ready`.
    """

    def __init__(self, early: Callable[[StopRequest], None]) -> None:
        self.signal: signal.Signals | None = None  # With which to end the ranks; None without a request.
        self.why = ""  # Source of the request.
        self.hurry = False  # Whether the ranks are to be killed without waiting for them.
        self.warned = False  # Whether a warning came.
        self._early: Callable[[StopRequest], None] | None = early
        self._lifeline = 0 if os.environ.get(contract.LIFELINE) else None
        self._since = 0.0
        self._is_handled = False
        self._warnings: list[signal.Signals] = []

    def listen(self) -> None:
        """Handle signals from now on."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        for number in WARNINGS:
            signal.signal(number, self._on_warning)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, *WARNINGS))

    def ready(self) -> None:
        """Leave requests to :meth:`check` from now on."""
        self._early = None

    def check(self) -> None:
        """Raise a StopRequestedError once for a request."""
        if self.signal is None and self._launcher_is_gone():
            self.request(signal.SIGTERM, "the launcher is gone")
        if self.signal is not None and not self._is_handled:
            self._is_handled = True
            raise StopRequestedError(self.why)

    def request(self, number: signal.Signals, why: str) -> None:
        """Request a stop as if this signal had come; ignored if there is a request already."""
        if self.signal is None:
            self.signal, self.why, self._since = number, why, time.monotonic()

    def take_warnings(self) -> list[signal.Signals]:
        """Return the warnings that came since the last call, each once, to be forwarded to the ranks."""
        taken = [self._warnings.pop(0) for _ in range(len(self._warnings))]
        return list(dict.fromkeys(taken))

    def _on_warning(self, number: int, _: FrameType | None) -> None:
        self.warned = True
        self._warnings.append(signal.Signals(number))

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.request(signal.Signals(number), f"got {signal.Signals(number).name}")
            if self._early:
                self._early(self)
        elif time.monotonic() - self._since > contract.ONE_REQUEST_SECONDS:
            self.hurry = True

    def _launcher_is_gone(self) -> bool:
        if self._lifeline is None or not select.select([self._lifeline], [], [], 0)[0]:
            return False
        return not os.read(self._lifeline, 4096)
