"""A tracker in a thread of its own: neither a slow network nor an error of it stops the training."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from allranks.runtime.say import say
from allranks.runtime.trackers.base import Tracker, Value

#: How long the end of the training waits for a tracker to write what is left.
CLOSE_SECONDS = 60.0


class Background:
    """Hands calls to a tracker, in order, from a thread that lives from the first call to :meth:`close`.

    A tracker that raises is reported once and gets nothing more.

    Args:
        tracker: takes the calls.
        seconds: how long :meth:`close` waits.
    """

    def __init__(self, tracker: Tracker, seconds: float = CLOSE_SECONDS) -> None:
        self._tracker = tracker
        self._seconds = seconds
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._failed = False
        self._closed = False
        self._thread: threading.Thread | None = None
        # Also after an error of the script, when nobody closes: what was logged until then is worth most.
        atexit.register(self.close)

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Let the tracker take a record."""
        self._hand_over(partial(self._tracker.write, step, values))

    def config(self, values: dict[str, object]) -> None:
        """Let the tracker take hyper-parameters, if it does."""
        if take := getattr(self._tracker, "config", None):
            self._hand_over(partial(take, values))

    def resume(self, step: int) -> None:
        """Let the tracker forget what is beyond a step, if it can."""
        if take := getattr(self._tracker, "resume", None):
            self._hand_over(partial(take, step))

    def close(self) -> None:
        """Wait until all is written, but not for ever. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._hand_over(self._tracker.close, closing=True)
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(self._seconds)
            if self._thread.is_alive():
                say(f"warning: tracker {self._name} did not end within {self._seconds:g} s; it may lack what is left")

    @property
    def _name(self) -> str:
        return type(self._tracker).__name__

    def _hand_over(self, call: Callable[[], Any], *, closing: bool = False) -> None:
        if self._failed or (self._closed and not closing):
            return
        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"allranks-{self._name}", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._failed:
                continue
            try:
                call()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and the training goes on
                self._failed = True
                text = str(error).strip().split("\n")[0]
                say(
                    f"warning: tracker {self._name} failed and gets no more metrics, the training goes on: "
                    f"{type(error).__name__}: {text}"
                )
