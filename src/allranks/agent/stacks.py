"""Stacks of ranks on request: faulthandler writes them from a signal handler in C, whatever the rank is doing.

No thread of the rank is stopped, and a system call that the signal interrupts is restarted: the training goes on.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

from allranks import contract
from allranks.system.processes import catches

#: One that no library and no scheduler is known to use.
_SIGNAL = signal.SIGRTMAX - 1
_LOOK_SECONDS = 1.0


def enable(path: Path, mode: int) -> None:
    """Have this process write the Python stacks of all its threads to a file when it is asked for them."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    faulthandler.register(_SIGNAL, os.fdopen(descriptor, "wb", 0), all_threads=True)


class StackRequests:
    """Passes requests of the launcher, a file in the attempt's directory, on to the ranks of this node."""

    def __init__(self, folder: Path, mode: int) -> None:
        self._request, self._answer, self._mode = (
            folder.parent / contract.STACKS_REQUEST,
            folder / contract.STACKS,
            mode,
        )
        self._next = 0.0
        self._answered = self._newest()

    def tick(self, find: Callable[[], Collection[int]]) -> None:
        """Answer a new request, for the ranks whose process ids ``find`` returns."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + _LOOK_SECONDS
        if (newest := self._newest()) == self._answered:
            return
        self._answered = newest
        asked = [pid for pid in find() if catches(pid, _SIGNAL)]  # It would end a process that has no handler.
        for pid in asked:
            try:
                os.kill(pid, _SIGNAL)
            except ProcessLookupError:
                pass  # It has just ended.
        temporary = self._answer.with_name(f".{self._answer.name}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._mode), "w") as stream:
                stream.write(json.dumps({"request": newest, "pids": asked}))
            temporary.replace(self._answer)
        except OSError:
            pass  # The disk is full or gone: the launcher says that this node did not answer.

    def _newest(self) -> int:
        try:
            return os.stat(self._request).st_mtime_ns  # noqa: PTH116 - once a second, and quicker
        except OSError:
            return 0
