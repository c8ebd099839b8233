"""A thread that reads a run for those who show it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

#: Seconds between two reads, at least and at most; and the part of a core that they take, if they can.
_SECONDS, _LONGEST, _SHARE = 1.0, 15.0, 0.03

_Read = TypeVar("_Read")


class Reader(threading.Thread, Generic[_Read]):
    """Reads again and again in a thread, since a scheduler or a file server may not answer for long."""

    def __init__(self, read: Callable[[], _Read], wake: Callable[[], object] = lambda: None) -> None:
        super().__init__(name="allranks-reader", daemon=True)
        self._read, self._wake = read, wake
        self._latest: _Read | None = None
        self._failure: BaseException | None = None
        self._next = threading.Event()
        self._is_over = False
        self.start()

    def run(self) -> None:
        """Read until ``stop``: threading calls it."""
        try:
            self._latest = self._read()  # All that there is: what it takes is no measure of what is to come.
            self._wake()
            self._next.wait(_SECONDS)
            while not self._is_over:
                self._next.clear()
                began = time.thread_time()
                self._latest = self._read()
                self._wake()
                self._next.wait(min(_LONGEST, max(_SECONDS, (time.thread_time() - began) / _SHARE)))
        except BaseException as error:  # noqa: BLE001 - it is raised where it is seen
            self._failure = error
            self._wake()

    def newest(self) -> _Read | None:
        """Return what was read last; None if nothing has been. Raises what ended the thread."""
        if self._failure:
            raise self._failure
        return self._latest

    def hurry(self, is_needed: bool) -> None:
        """Read again now, if something else is to be read."""
        if is_needed:
            self._next.set()

    def stop(self) -> None:
        """Stop after the current read."""
        self._is_over = True
        self._next.set()
