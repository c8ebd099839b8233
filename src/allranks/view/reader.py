"""Polls a run for a screen: a thread that reads repeatedly, changes of a file, and checkpoints."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from allranks import contract
from allranks.record.events import read_saves

#: Least and most seconds between two reads, and the part of a core that they should take.
_SECONDS, _LONGEST, _SHARE = 1.0, 15.0, 0.03
#: Most checkpoints to keep.
_MOST_SAVES = 200

_Read = TypeVar("_Read")


class Reader(threading.Thread, Generic[_Read]):
    """Reads repeatedly in a thread, because a scheduler or file server may take long to answer."""

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
            self._latest = self._read()  # The first read is complete, so its duration is not typical.
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
        """Return the newest result; None before the first. Raises the error that ended the thread."""
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


class Changes:
    """Detects changes of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    def are_there(self) -> bool:
        """Return whether the file has changed since the last call; a missing file has not changed at first."""
        before, self._seen = self._seen, None
        with suppress(OSError):
            stat = self._path.stat()
            self._seen = stat.st_mtime_ns, stat.st_size
        return self._seen != before


class Saves:
    """The newest checkpoints of a run, the oldest first: step, and when it was written, if that is recorded."""

    def __init__(self, folder: Path) -> None:
        self.all: list[tuple[int, float | None]] = []
        self._folder = folder
        self._changes = Changes(folder / contract.CHECKPOINTS_FILE)

    @property
    def newest(self) -> tuple[int, float | None] | None:
        """The step of the newest checkpoint, and when it was written, if that is known."""
        return self.all[-1] if self.all else None

    def read(self) -> bool:
        """Read what is new; return whether there was any."""
        if not self._changes.are_there():
            return False
        saves = [save for save in read_saves(self._folder) if save.path][-_MOST_SAVES:]
        self.all = [(save.step, save.time) for save in saves]
        return True
